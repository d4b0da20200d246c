"""Chooses tokens in torch: for devices without sampling kernels, and as the kernels' reference.

Passes over [R, V] numbers (R rows, V = vocab_size), each a read or a read and a write of
float32:

| rows                            | passes |
|---------------------------------|--------|
| all greedy, no processing       | 1 read of the logits as they are |
| temperature (and greedy mixed)  | 11: scale, 7 for the noise, its logarithm, subtract, maximum |
| … with min_p                    | + 3 |
| top_k up to `SMALL_TOP_K`       | 2 + 4 for sort keys + a `topk` over int64, then [rows, k] |
| top_p, larger top_k             | 2 + 4 + a sort over int64 + about 14 |
| logit_bias, allowed_token_ids   | 1 copy of the logits + 2 |
| a grammar                       | the copy, unless nothing but a temperature is asked for, + 1 |
| penalties                       | the copy + about 12 |
| logprobs                        | about 7 + 4 + a `topk` over int64 |

All stages except the first two process only the rows that request them. Wide temporaries are
bounded by `CHUNK_ELEMENTS`. With R = 256 and V = 151,936 a pass moves 156 to 311 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...config.output_options import LogprobsMode
from ...nn.operations import Operations
from .gumbel import TokenNoise
from .logprobs import LEAST, Logprobs, row_logprobs, top_tokens
from .masks import TokenMask
from .processors import Processors
from .rejection import DrawnDrafts, leaving
from .row_chunks import chunks, put, select, slices, table_chunks, take
from .sampling_columns import Column, Flag
from .sampling_state import MOST_COUNTED, SamplingState
from .step_stages import BadWordRows, Rows, StepStages, StopRows

_INF = float("inf")


@dataclass(frozen=True)
class SamplerOutput:
    token_ids: torch.Tensor
    """[R] int64"""
    bad_rows: torch.Tensor
    """[R] bool: nothing could be chosen (NaN, +inf, or all masked); the token is 0."""
    logprobs: Logprobs | None
    """None if not requested; zeros in other rows."""

    @property
    def chosen(self) -> torch.Tensor:
        """[R] int32: `token_ids`, -1 in bad rows."""
        return self.token_ids.int().masked_fill_(self.bad_rows, -1)


class TorchSampler:
    """Chooses a token per row, in `Sampler`'s order of stages."""

    def __init__(
        self,
        state: SamplingState,
        processors: Processors,
        operations: Operations,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        self._scores_processed = logprobs_mode.startswith("processed")
        self.normalized = logprobs_mode.endswith("logprobs")
        """Whether log-probabilities are asked for, not logits."""
        self._state = state
        self._processors = processors
        self._operations = operations
        self.noise = TokenNoise(state.vocab_size, state.device)

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        rows_host: list[int],
        lengths: torch.Tensor,
        mask: TokenMask | None = None,
        drafts: DrawnDrafts | None = None,
    ) -> SamplerOutput:
        """Choose a token per row, after `state.upload()`.

        logits: [R, vocab_size], not changed; slots: [R] int64; rows_host: the same on the host;
        lengths: [R] int32 or int64, tokens before the sampled one; mask: some rows' allowed tokens;
        drafts: to be accepted or rejected.
        """
        stages = self._state.plan(rows_host)
        return self.run(logits, stages, slots, lengths, mask, rows_host, drafts)

    def run(
        self,
        logits: torch.Tensor,
        stages: StepStages,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        mask: TokenMask | None = None,
        rows_host: Sequence[int] = (),
        drafts: DrawnDrafts | None = None,
    ) -> SamplerOutput:
        """As `sample`, with known stages; rows_host: for processors."""
        state = self._state
        packed = state.packed.index_select(0, slots)
        served = rows_host if state.asked(list(rows_host)) & Flag.PROCESSED else ()
        processed = self._process(logits, stages, packed, slots, lengths, mask, served)
        if self._processors.serves(served, invariant=True):
            factors = packed.view(torch.float32)[:, Column.INVERSE_TEMPERATURE]
            processed = processed * factors.unsqueeze(1)
            factors.fill_(1.0)
            self._processors.apply(processed, served, lengths, invariant=True)
        if stages.all_greedy:
            best, token_ids = processed.max(dim=-1)
            bad_rows = best.isfinite().logical_not_()
        else:
            choices = processed
            if drafts is not None:
                scores = self._filtered(processed, stages, packed)
                choices = leaving(processed, drafts.tokens(scores, packed, lengths))
            token_ids, bad_rows = self._choose(choices, stages, packed, lengths)
        token_ids = token_ids.masked_fill(bad_rows, 0)
        if stages.penalties is not None:
            rows = stages.penalties
            places = select(slots, rows) * state.vocab_size + select(token_ids, rows)
            flat = state.counts.view(-1)
            old_counts = flat.take(places).int()
            more = old_counts.bitwise_and(MOST_COUNTED).add_(1).clamp_(max=MOST_COUNTED)
            more.bitwise_or_(old_counts.bitwise_and(~MOST_COUNTED))
            flat.index_copy_(0, places, more.to(torch.int16))
        logprobs = None
        if stages.logprobs is not None:
            scored = logits
            if self._scores_processed:
                scored = self._filtered(processed, stages, packed)
            logprobs = row_logprobs(
                scored, token_ids, stages.logprobs, stages.max_logprobs, normalized=self.normalized
            )
            if self._scores_processed:
                logprobs.logprob.clamp_(min=LEAST)
                logprobs.top_logprobs.clamp_(min=LEAST)
        return SamplerOutput(token_ids, bad_rows, logprobs)

    # ------------------------------------------------------------ before the choice

    def _process(
        self,
        logits: torch.Tensor,
        stages: StepStages,
        packed: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        mask: TokenMask | None,
        served: Sequence[int],
    ) -> torch.Tensor:
        """[R, vocab_size]: `logits`, or a changed float32 copy."""
        if not stages.processes_logits and not served and mask is None:
            return logits
        work = logits.to(torch.float32, copy=True).contiguous()
        if mask is not None:
            self._operations.mask_tokens(work, mask.bits, mask.rows)
        if stages.bias is not None:
            for rows, table in table_chunks(stages.bias.batch, stages.bias.table, work):
                part = take(work, rows)
                part.add_(self._state.bias.index_select(0, table))
                put(work, rows, part)
        if stages.bad_words is not None:
            self._ban_words(work, stages.bad_words, packed, slots, lengths)
        if stages.min_tokens is not None:
            _ban_stops(work, stages.min_tokens, packed, lengths)
        if served:
            self._processors.apply(work, served, lengths, invariant=False)
        if stages.penalties is not None:
            self._penalize(work, stages.penalties, packed, slots)
        return work

    def _ban_words(
        self,
        work: torch.Tensor,
        rows: BadWordRows,
        packed: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        """Mask each bad word's last token if the output ends in its beginning."""
        history = self._state.token_history
        slots, lengths = select(slots, rows), select(lengths, rows)
        prompt_lens = select(packed[:, Column.PROMPT_LEN], rows)
        prefixes, last = rows.words[:, :, :-1], rows.words[:, :, -1]
        back = torch.arange(-prefixes.shape[2], 0, device=work.device)
        positions = lengths.unsqueeze(1) + back
        in_output = positions >= prompt_lens.unsqueeze(1)
        places = slots.unsqueeze(1) * history.shape[1] + positions.clamp(min=0)
        tail = torch.where(in_output, history.view(-1).take(places), -2)
        matches = (prefixes == tail.unsqueeze(1)).logical_or_(prefixes < 0).all(dim=-1)
        _ban(work, rows, last, matches)

    def _penalize(
        self, work: torch.Tensor, penalized: Rows, packed: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Apply repetition (prompt and output), frequency and presence (output) penalties."""
        floats = packed.view(torch.float32)
        for rows in chunks(penalized, work):
            part, settings = take(work, rows), take(floats, rows)
            counts = self._state.counts.index_select(0, take(slots, rows))
            times = counts.bitwise_and(MOST_COUNTED)
            factor = torch.where(
                part > 0,
                settings[:, Column.INVERSE_REPETITION, None],
                settings[:, Column.REPETITION, None],
            )
            part.mul_(factor.masked_fill_(counts == 0, 1.0))
            part.sub_(times * settings[:, Column.FREQUENCY, None])
            part.sub_((times > 0) * settings[:, Column.PRESENCE, None])
            put(work, rows, part)

    # ------------------------------------------------------------ the choice

    def _choose(
        self,
        logits: torch.Tensor,
        stages: StepStages,
        packed: torch.Tensor,
        lengths: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lanes = packed[:, Column.LANES :]
        keys = self.noise.row_keys(lanes, lengths)
        floats = packed.view(torch.float32)
        token_ids = lengths.new_zeros(stages.num_rows, dtype=torch.int64)
        bad_rows = lengths.new_zeros(stages.num_rows, dtype=torch.bool)
        groups = (
            (stages.plain, None),
            (stages.top_k, stages.max_top_k),
            (stages.sort, self._state.vocab_size),
        )
        for group, k in groups:
            if group is None:
                continue
            for rows in chunks(group, logits):
                settings, row_keys = take(floats, rows), take(keys, rows)
                scaled = take(logits, rows) * settings[:, Column.INVERSE_TEMPERATURE, None]
                scaled = scaled.to(torch.float32)  # Only float64 logits are wider.
                if k is None:
                    chosen, bad = self._choose_plain(scaled, settings, row_keys, stages.any_min_p)
                else:
                    top_k = take(packed, rows)[:, Column.TOP_K]
                    chosen, bad = self._choose_ranked(scaled, top_k, settings, row_keys, k)
                put(token_ids, rows, chosen)
                put(bad_rows, rows, bad)
        return token_ids, bad_rows

    def _filtered(
        self, processed: torch.Tensor, stages: StepStages, packed: torch.Tensor
    ) -> torch.Tensor:
        """[R, vocab_size] float32: what rows are sampled from, tokens that are left out at -inf."""
        floats = packed.view(torch.float32)
        out = processed.to(torch.float32) * floats[:, Column.INVERSE_TEMPERATURE, None]
        groups = ((stages.top_k, stages.max_top_k), (stages.sort, self._state.vocab_size))
        for group, k in groups:
            for rows in () if group is None else chunks(group, out):
                part, settings = take(out, rows), take(floats, rows)
                top_k = take(packed, rows)[:, Column.TOP_K]
                values, ids = kept(part, top_k, settings, k)
                put(out, rows, torch.full_like(part, -_INF).scatter_(1, ids, values))
        if stages.any_min_p:
            least = out.amax(dim=-1, keepdim=True) + floats[:, Column.LOG_MIN_P, None]
            out.masked_fill_(out < least, -_INF)
        return out

    def _choose_plain(
        self, scaled: torch.Tensor, floats: torch.Tensor, keys: torch.Tensor, any_min_p: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if any_min_p:
            least = scaled.amax(dim=-1, keepdim=True) + floats[:, Column.LOG_MIN_P, None]
            scaled.masked_fill_(scaled < least, -_INF)
        noise = self.noise.exponential(keys)
        # xlogy is exactly 0 where the weight is 0, so greedy rows keep their logits.
        scaled.sub_(torch.special.xlogy(floats[:, Column.NOISE, None], noise))
        best, token_ids = scaled.max(dim=-1)
        return token_ids, best.isfinite().logical_not_()

    def _choose_ranked(
        self,
        scaled: torch.Tensor,
        top_k: torch.Tensor,
        floats: torch.Tensor,
        keys: torch.Tensor,
        k: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose among the k largest, filtered."""
        peak = scaled.amax(dim=-1, keepdim=True)
        values, ids = kept(scaled, top_k, floats, k)
        values.sub_(self.noise.exponential(keys, ids).log_())
        place = values.argmax(dim=-1, keepdim=True)
        return ids.gather(1, place).squeeze(1), peak.squeeze(1).isfinite().logical_not_()


def filtered(scaled: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return scaled [R, V], tokens that the rows' top_k, top_p and min_p leave out at -inf."""
    floats, out = packed.view(torch.float32), torch.full_like(scaled, -_INF)
    for rows in slices(*scaled.shape):
        top_k = packed[rows, Column.TOP_K]
        values, ids = kept(scaled[rows], top_k, floats[rows], scaled.shape[1])
        out[rows].scatter_(1, ids, values)
    return out


def kept(
    scaled: torch.Tensor, top_k: torch.Tensor, floats: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest of scaled [R, V], those that filters leave out at -inf, and their ids:
    [R, k] each."""
    peak = scaled.amax(dim=-1, keepdim=True)
    values, ids = top_tokens(scaled, k)
    ranks = torch.arange(k, device=scaled.device)
    dropped = ranks >= top_k.unsqueeze(1)
    dropped.logical_or_(values < peak + floats[:, Column.LOG_MIN_P, None])
    values.masked_fill_(dropped, -_INF)
    probs = torch.softmax(values, dim=-1, dtype=torch.float64)
    before = probs.cumsum(dim=-1).sub_(probs)
    values.masked_fill_(before >= floats[:, Column.TOP_P, None], -_INF)
    return values, ids


def _ban_stops(
    work: torch.Tensor, rows: StopRows, packed: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Mask stop ids before min_tokens."""
    settings = select(packed, rows)
    num_output = select(lengths, rows) - settings[:, Column.PROMPT_LEN]
    early = num_output < settings[:, Column.MIN_TOKENS]
    _ban(work, rows, rows.stop_ids, early.unsqueeze(1))


def _ban(work: torch.Tensor, rows: Rows, token_ids: torch.Tensor, active: torch.Tensor) -> None:
    """Mask token_ids [count, n] where active [count, n or 1]; negative ids are padding."""
    batch = rows.batch
    if batch is None:
        batch = torch.arange(rows.count, device=work.device)
    places = batch.unsqueeze(1) * work.shape[1] + token_ids.clamp(min=0)
    limits = torch.where(active & (token_ids >= 0), -_INF, _INF).to(work.dtype)
    work.view(-1).scatter_reduce_(0, places.view(-1), limits.view(-1), "amin")
