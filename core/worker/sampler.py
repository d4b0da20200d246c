"""The sampler: logits in, tokens out, all on the device, without one synchronisation.

Passes over [R, V]: greedy alone 2 (finite check and argmax); random 3 more and the noise; each of
top-k, min-p, penalties, bias 1 to 3 more, only when some row asks for it; top-p sorts.
Order: log-probabilities of the raw logits; allowed tokens and bias; bad words; min_tokens;
penalties; greedy choice; temperature; min-p; top-k and top-p; random choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .noise import gumbel_noise
from .sampling_state import SamplingState, Stage

CHUNK_ELEMENTS = 1 << 27
"""Rows times vocabulary scored at once for prompt log-probabilities."""
NEGATIVE = float("-inf")


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of chosen tokens and of the k most likely ones, for R rows."""

    sampled_logprob: torch.Tensor
    """[R] float32"""
    sampled_rank: torch.Tensor
    """[R] int64, 1 for the most likely"""
    top_ids: torch.Tensor
    """[R, k] int64"""
    top_logprobs: torch.Tensor
    """[R, k] float32"""


@dataclass(frozen=True)
class SamplerOutput:
    """One token a row."""

    token_ids: torch.Tensor
    """[R] int64"""
    bad_rows: torch.Tensor
    """[R] bool: logits that are not finite; the token means nothing."""
    scores: Scores | None


class Sampler:
    """Chooses tokens for rows of a batch by their slots' parameters."""

    def __init__(self, state: SamplingState) -> None:
        self.state = state
        self._all_tokens = torch.arange(state.vocab_size, device=state.device, dtype=torch.int32)

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        rows_host: list[int],
        lengths: torch.Tensor,
    ) -> SamplerOutput:
        """logits: [R, V]; slots: [R] int64 and rows_host, the same on the host; lengths: [R] int64,
        tokens before the sampled one."""
        state = self.state
        stages = state.stages_of(rows_host)
        raw = logits.float()
        bad_rows = ~torch.isfinite(raw.amax(-1))
        x = self._constrain(raw, slots, lengths, stages)
        token_ids = x.argmax(-1)
        if stages & Stage.RANDOM:
            token_ids = self._choose(x, token_ids, slots, rows_host, lengths, stages)
        token_ids = torch.where(bad_rows, 0, token_ids)
        if stages & Stage.PENALTIES:
            assert state.output_counts is not None
            flat = slots * state.vocab_size + token_ids
            state.output_counts.view(-1).scatter_add_(
                0, flat, torch.ones_like(flat, dtype=torch.int32)
            )
        wanted = int(state.num_logprobs[rows_host].max())
        scores = score(torch.log_softmax(raw, -1), token_ids, wanted) if wanted >= 0 else None
        return SamplerOutput(token_ids, bad_rows, scores)

    def _constrain(
        self, x: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, stages: Stage
    ) -> torch.Tensor:
        """What changes even the greedy choice. Never in place: `x` is still needed."""
        state = self.state
        if stages & Stage.BIAS:
            assert state.bias is not None
            x = x + state.bias[state.column("bias_row", slots)]
        if stages & Stage.BAD_WORDS:
            x = self._ban_words(x, slots, lengths)
        if stages & Stage.MIN_TOKENS:
            assert state.stop_ids is not None
            early = lengths < state.column("min_length", slots)
            x = _lower(x, state.stop_ids[slots], early[:, None])
        if stages & Stage.PENALTIES:
            x = self._penalise(x, slots)
        return x

    def _ban_words(
        self, x: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        state = self.state
        assert state.bad_words is not None
        words = state.bad_words[slots]  # [R, W, L]
        back = torch.arange(words.shape[2] - 1, 0, -1, device=x.device)
        at = lengths[:, None] - back
        before = state.token_history[slots[:, None], at.clamp(min=0)].long()
        before = torch.where(at >= 0, before, -3)
        prefix = words[:, :, :-1]
        matches = ((prefix == before[:, None, :]) | (prefix == -1)).all(-1)
        last = words[:, :, -1]
        active = self._active(Stage.BAD_WORDS, slots)[:, None]
        return _lower(x, last.clamp(min=0), matches & (last >= 0) & active)

    def _penalise(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        state = self.state
        assert state.output_counts is not None and state.in_prompt is not None
        counts = state.output_counts[slots]
        seen = counts > 0
        repetition = state.column("repetition", slots)[:, None]
        scaled = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(seen | state.in_prompt[slots], scaled, x)
        x = x - state.column("frequency", slots)[:, None] * counts
        return x - state.column("presence", slots)[:, None] * seen

    def _active(self, stage: Stage, slots: torch.Tensor) -> torch.Tensor:
        """[R] bool: rows that ask for `stage`."""
        return (self.state.column("stages", slots) & int(stage)) != 0

    def _choose(
        self,
        x: torch.Tensor,
        greedy: torch.Tensor,
        slots: torch.Tensor,
        rows_host: list[int],
        lengths: torch.Tensor,
        stages: Stage,
    ) -> torch.Tensor:
        """Gumbel-max over what the limits leave; greedy rows keep their token."""
        state = self.state
        x = x / state.column("temperature", slots)[:, None]
        if stages & Stage.MIN_P:
            floor = x.amax(-1, keepdim=True) + state.column("min_p", slots).log()[:, None]
            x = torch.where(x < floor, NEGATIVE, x)
        seeds = state.column("seed", slots)
        top_k = state.column("top_k", slots)[:, None]
        if stages & Stage.TOP_P:
            ordered, token_ids = x.sort(dim=-1, descending=True, stable=True)
            place = self._all_tokens[None, :]
            ordered = torch.where((top_k > 0) & (place >= top_k), NEGATIVE, ordered)
            probs = ordered.softmax(-1)
            before = probs.cumsum(-1) - probs
            limit = state.column("top_p", slots)[:, None]
            ordered = torch.where((before >= limit) & (limit < 1.0), NEGATIVE, ordered)
            best = (ordered + gumbel_noise(seeds, lengths, token_ids)).argmax(-1, keepdim=True)
            chosen = token_ids.gather(1, best)[:, 0]
        else:
            if stages & Stage.TOP_K:
                most = int(state.top_k[rows_host].max())
                kth = x.topk(most, -1).values.gather(1, (top_k - 1).clamp(min=0))
                x = torch.where((top_k > 0) & (x < kth), NEGATIVE, x)
            chosen = (x + gumbel_noise(seeds, lengths, self._all_tokens)).argmax(-1)
        return torch.where(self._active(Stage.RANDOM, slots), chosen, greedy)


def score(logprobs: torch.Tensor, token_ids: torch.Tensor, k: int) -> Scores:
    """logprobs: [R, V] float32; token_ids: [R] int64."""
    chosen = logprobs.gather(1, token_ids[:, None])
    top = logprobs.topk(k, -1)
    return Scores(
        sampled_logprob=chosen[:, 0],
        sampled_rank=(logprobs > chosen).sum(-1) + 1,
        top_ids=top.indices,
        top_logprobs=top.values,
    )


def prompt_logprobs(logits: torch.Tensor, targets: torch.Tensor, k: int) -> Scores:
    """Score given tokens. logits: [N, V]; targets: [N] int64. Works in chunks of rows."""
    rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    parts = [
        score(torch.log_softmax(part.float(), -1), wanted, k)
        for part, wanted in zip(logits.split(rows), targets.split(rows), strict=True)
    ]
    return Scores(
        **{
            name: torch.cat([getattr(part, name) for part in parts])
            for name in Scores.__dataclass_fields__
        }
    )


def _lower(x: torch.Tensor, token_ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """-inf at token_ids [R, K] where `where` [R, K] or [R, 1]; repeated ids are fine."""
    values = torch.where(where, NEGATIVE, float("inf")).expand(token_ids.shape)
    return x.scatter_reduce(1, token_ids, values, "amin")
