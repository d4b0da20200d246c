"""The sampler: logits to tokens on the device, without synchronization.

If the operations have sampling kernels (`Operations.sample`), these do all the work in a few
launches that a graph can hold, and this class only selects them. The rest of this file does the
same in torch, for other devices and as the reference of the kernels.

In torch, passes over [R, V] numbers (R rows, V = vocab_size), each a read or a read and a write of
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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ...nn.operations import GrammarBits, Operations, SampleOutputs, SlotTables
from ...parallel.ranks import Ranks
from ...step import NOTHING_IN_PROCESS, InProcess, SlotStart
from ..parts import PerSlot
from .gumbel import TokenNoise
from .masks import TokenMask
from .processors import Processors
from .sampling_columns import EDITS, MOST_TOP_TOKENS, NUM_COLUMNS, Column, Flag
from .sampling_state import (
    MOST_COUNTED,
    BadWordRows,
    Rows,
    SamplingState,
    StepStages,
    StopRows,
    plain_stages,
)
from .vocabulary_shard import VocabularyShard

CHUNK_ELEMENTS = 1 << 24
"""Numbers that one wide temporary may hold."""

SCORED_ROWS = 256
"""Prompt positions that the kernels score per launch."""

_INF = float("inf")


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of N positions from raw logits, on the device."""

    top_ids: torch.Tensor
    """[N, k or more] int32 or int64, most likely first, lower ids first among equals"""
    top_logprobs: torch.Tensor
    """[N, k or more] float32"""
    logprob: torch.Tensor
    """[N] float32, of the position's own token"""
    rank: torch.Tensor
    """[N] int32 or int64, of the position's own token: 1 + the number of more likely ones"""


@dataclass(frozen=True)
class SamplerOutput:
    """One step's tokens, on the device."""

    token_ids: torch.Tensor
    """[R] int64"""
    bad_rows: torch.Tensor
    """[R] bool: no token could be chosen (NaN or +inf in the logits, or everything is masked);
    the row's token is 0."""
    logprobs: Logprobs | None
    """None if no row requested them; rows that did not hold zeros."""

    @property
    def chosen(self) -> torch.Tensor:
        """[R] int32: `token_ids`, and -1 in bad rows."""
        return self.token_ids.int().masked_fill_(self.bad_rows, -1)


class Sampler(PerSlot):
    """Chooses one token per row. Order of stages: vLLM's (v1).

    Raw log-probabilities come from the untouched logits. Then: the grammar, allowed tokens and
    logit_bias, bad words, min_tokens (masks and finite biases commute), plugged-in processors,
    penalties, temperature, min_p, top_k, top_p, and the largest `logit + Gumbel noise`; greedy rows
    have none.

    The set kept by top_k and top_p is exact: tokens in order of (logit, then lower id); the first
    top_k; of these the smallest set whose probabilities, renormalised, reach top_p; always at least
    one.

    The noise depends on (seed, position, token) alone: a request draws the same in any batch.
    """

    def __init__(
        self,
        state: SamplingState,
        processors: Processors | None = None,
        operations: Operations | None = None,
    ) -> None:
        self._state = state
        self._operations = operations or Operations()
        if self._operations.samples != state.kernels:
            raise ValueError("the state keeps its books in torch, or for kernels: as it was made")
        self._outputs: SampleOutputs | None = None
        self._scoring: torch.Tensor | None = None
        self.processors = processors or Processors((), state.device)
        self._noise = TokenNoise(state.vocab_size, state.device)
        self.shard: VocabularyShard | None = None
        """Samples plain rows from logits that ranks keep where they are."""

    def divide(self, model: nn.Module, ranks: Ranks) -> None:
        """Sample plain rows of this model without exchanging logits, if ranks divide its head."""
        self.shard = VocabularyShard.of(model, ranks, self._state, self._noise, self._operations)

    # ------------------------------------------------------------ slots

    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        """Start a request in a slot: its parameters, and the processors that serve it."""
        processors = self.processors
        self._state.start(start, processed=bool(processors) and processors.start(start))

    def release(self, slot: int) -> None:
        """Release the slot of a request that ended or was preempted."""
        self.processors.release(slot)
        self._state.release(slot)

    def upload(self) -> None:
        """Enqueue what changed since the last call."""
        self._state.upload()

    # ------------------------------------------------------------ in torch

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        rows_host: list[int],
        lengths: torch.Tensor,
        mask: TokenMask | None = None,
    ) -> SamplerOutput:
        """Call after `state.upload()`.

        logits: [R, vocab_size], any float dtype, left as it is; slots: [R] int64;
        rows_host: the same slots on the host; lengths: [R] int32 or int64, tokens known before
        the sampled one, which is also its position in the sequence; mask: the only tokens that
        some rows may get.
        """
        return self._run(logits, self._state.plan(rows_host), slots, lengths, mask, rows_host)

    def mask(self, logits: torch.Tensor, mask: TokenMask) -> None:
        """Set logits of disallowed tokens to -inf, in place. logits: [R, vocab_size]"""
        self._operations.mask_tokens(logits, mask.bits, mask.rows)

    # ------------------------------------------------------------ by kernels

    @property
    def outputs(self) -> SampleOutputs:
        """Output buffers of the kernels, at fixed addresses: one row for each row that a step may
        have."""
        if self._outputs is None:
            self._outputs = sample_outputs(self._state.num_slots, self._state.device)
        return self._outputs

    def is_plain(self, rows_host: list[int]) -> bool:
        """Whether these slots request at most a temperature, so that `sample_plain` serves them."""
        if self._operations.samples:
            return not self._state.asked(rows_host)
        return self.is_plain_in_torch(rows_host)

    def is_plain_in_torch(self, rows_host: list[int]) -> bool:
        """The same for sampling in torch, ignoring grammars. False if there are kernels."""
        if self._operations.samples:
            return False
        stages = self._state.plan(rows_host)
        processed = self._state.asked(rows_host) & Flag.PROCESSED
        return stages.graph_safe and not stages.any_min_p and not processed

    def recordable(self, rows_host: list[int]) -> bool:
        """Whether `sample_step` does all that these slots request, with launches that a graph may
        hold: no grammar, no plugged-in processor, no more than 20 top tokens."""
        if not self._operations.samples:
            return False
        return not self._state.asked(rows_host) & (Flag.GRAMMAR | Flag.PROCESSED | Flag.WIDE)

    def sample_plain(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        out: SampleOutputs,
    ) -> None:
        """Sample rows that are greedy or have only a temperature: the same kernels whatever the
        rows are, so it may be recorded in a graph. Arguments as for `sample`; tokens go to the
        history, and to `out.chosen`, [R] or more: -1 in bad rows."""
        state = self._state
        if self._operations.samples:
            self._operations.sample(logits, slots, lengths, self._tables, out, plain=True)
            return
        num_rows = logits.shape[0]
        sampled = self._run(logits, plain_stages(num_rows), slots, lengths)
        state.token_history[slots, lengths] = sampled.token_ids.int()
        out.chosen[:num_rows].copy_(sampled.chosen)

    def sample_step(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        out: SampleOutputs,
        mask: TokenMask | None = None,
    ) -> bool:
        """Sample any rows that are `recordable`, and with `mask` those with a grammar: the same
        launches whatever the rows are, so it may be recorded in a graph.

        Tokens go to the history and to `out`, as `Operations.sample` says; rows in the scratch slot
        (the state's last) are padding. Returns False, with nothing done, if there are no kernels
        for it here; `sample` does it in torch.
        """
        if not self._operations.samples:
            return False
        self._launch(logits, slots, lengths, out, mask)
        return True

    def _launch(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        out: SampleOutputs,
        mask: TokenMask | None = None,
        skip: Flag | None = None,
    ) -> None:
        self._operations.sample(
            logits, slots, lengths, self._tables, out, plain=False, grammar=_bits(mask),
            skip=int(skip or 0),
        )  # fmt: skip

    @property
    def _tables(self) -> SlotTables:
        state = self._state
        return SlotTables(state.packed, state.counts, state.allowed, state.token_history)

    def sample_eagerly(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        rows_host: list[int],
        lengths: torch.Tensor,
        mask: TokenMask | None = None,
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """Sample any rows, by kernels if available, else in torch; not for graphs. Tokens go to the
        history. → chosen [R] int32, -1 in bad rows; log-probabilities, if any row asked.

        The returned tensors may be overwritten by the next step.
        """
        state = self._state
        if self.is_plain_in_torch(rows_host) and mask is None:
            out = self.outputs.first(len(rows_host))
            self.sample_plain(logits, slots, lengths, out)
            return out.chosen, None
        if not self._operations.samples:
            sampled = self.sample(logits, slots, rows_host, lengths, mask)
            state.token_history[slots, lengths] = sampled.token_ids.int()
            return sampled.chosen, sampled.logprobs
        flags = state.asked(rows_host)
        out = self.outputs.first(len(rows_host))
        if mask is None and not flags:
            self.sample_plain(logits, slots, lengths, out)
            return out.chosen, None
        late = bool(flags & (Flag.WIDE | Flag.PROCESSED))
        if flags & Flag.PROCESSED:
            self._launch_processed(logits, slots, rows_host, lengths, out, mask)
        else:
            self._launch(logits, slots, lengths, out, mask, Flag.LOGPROBS if late else None)
        if not flags & (Flag.WIDE | Flag.LOGPROBS):
            return out.chosen, None
        if late:
            return out.chosen, self._late_logprobs(logits, rows_host, out.chosen)
        return out.chosen, Logprobs(*out[1:]) if flags & Flag.LOGPROBS else None

    def _launch_processed(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        rows_host: list[int],
        lengths: torch.Tensor,
        out: SampleOutputs,
        mask: TokenMask | None,
    ) -> None:
        """Apply logit edits and processors, then sample from the resulting logits."""
        work = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        first, skip = EDITS & ~Flag.PENALTIES, Flag.LOGPROBS
        edit = self._operations.edit_logits
        edit(logits, slots, self._tables, work, edits=int(first), scale=False, grammar=_bits(mask))
        self.processors.apply(work, rows_host, slots, lengths, invariant=False)
        if self.processors.serves(rows_host, invariant=True):
            edit(work, slots, self._tables, work, edits=int(Flag.PENALTIES), scale=True)
            self.processors.apply(work, rows_host, slots, lengths, invariant=True)
            skip |= EDITS | Flag.SCALED
        else:
            skip |= first
        self._launch(work, slots, lengths, out, None, skip)

    def precompile_processed(
        self, logits: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, out: SampleOutputs
    ) -> None:
        """Launch the kernels of a step with processors, but no processor."""
        if self._operations.samples and self.processors:
            self._launch_processed(logits, slots, [], lengths, out, None)

    def _late_logprobs(
        self, logits: torch.Tensor, rows_host: list[int], chosen: torch.Tensor
    ) -> Logprobs:
        """Compute log-probabilities of the rows that request them, for any number of top tokens,
        after tokens are chosen."""
        token_ids = chosen.clamp(min=0).to(torch.int64)
        return self._spread_logprobs(logits, token_ids, *self._state.scored_rows(rows_host))

    def _run(
        self,
        logits: torch.Tensor,
        stages: StepStages,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        mask: TokenMask | None = None,
        rows_host: Sequence[int] = (),
    ) -> SamplerOutput:
        state = self._state
        packed = state.packed.index_select(0, slots)
        served = rows_host if state.asked(list(rows_host)) & Flag.PROCESSED else ()
        processed = self._process(logits, stages, packed, slots, lengths, mask, served)
        if self.processors.serves(served, invariant=True):
            factors = packed.view(torch.float32)[:, Column.INVERSE_TEMPERATURE]
            processed = processed * factors.unsqueeze(1)
            factors.fill_(1.0)
            self.processors.apply(processed, served, slots, lengths, invariant=True)
        if stages.all_greedy:
            best, token_ids = processed.max(dim=-1)
            bad_rows = best.isfinite().logical_not_()
        else:
            token_ids, bad_rows = self._choose(processed, stages, packed, lengths)
        token_ids = token_ids.masked_fill(bad_rows, 0)
        if stages.penalties is not None:
            rows = stages.penalties
            places = rows.table * state.vocab_size + _select(token_ids, rows)
            flat = state.counts.view(-1)
            old_counts = flat.take(places).int()
            more = old_counts.bitwise_and(MOST_COUNTED).add_(1).clamp_(max=MOST_COUNTED)
            more.bitwise_or_(old_counts.bitwise_and(~MOST_COUNTED))
            flat.index_copy_(0, places, more.to(torch.int16))
        return SamplerOutput(token_ids, bad_rows, self._logprobs(logits, token_ids, stages))

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
        """[R, vocab_size]: `logits` itself if nothing changes it, else a float32 copy, changed."""
        if not stages.processes_logits and not served and mask is None:
            return logits
        work = logits.to(torch.float32, copy=True).contiguous()
        if mask is not None:
            self.mask(work, mask)
        if stages.bias is not None:
            for rows, table in _table_chunks(stages.bias.batch, stages.bias.table, work):
                part = _take(work, rows)
                part.add_(self._state.bias.index_select(0, table))
                _put(work, rows, part)
        if stages.bad_words is not None:
            self._ban_words(work, stages.bad_words, packed, slots, lengths)
        if stages.min_tokens is not None:
            _ban_stops(work, stages.min_tokens, packed, lengths)
        if served:
            self.processors.apply(work, served, slots, lengths, invariant=False)
        if stages.penalties is not None:
            self._penalize(work, stages, packed)
        return work

    def _ban_words(
        self,
        work: torch.Tensor,
        rows: BadWordRows,
        packed: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        """Mask the last token of each bad word if the output ends in the tokens before it."""
        history = self._state.token_history
        slots, lengths = _select(slots, rows), _select(lengths, rows)
        prompt_lens = _select(packed[:, Column.PROMPT_LEN], rows)
        prefixes, last = rows.words[:, :, :-1], rows.words[:, :, -1]
        back = torch.arange(-prefixes.shape[2], 0, device=work.device)
        positions = lengths.unsqueeze(1) + back
        in_output = positions >= prompt_lens.unsqueeze(1)
        places = slots.unsqueeze(1) * history.shape[1] + positions.clamp(min=0)
        tail = torch.where(in_output, history.view(-1).take(places), -2)
        matches = (prefixes == tail.unsqueeze(1)).logical_or_(prefixes < 0).all(dim=-1)
        _ban(work, rows, last, matches)

    def _penalize(self, work: torch.Tensor, stages: StepStages, packed: torch.Tensor) -> None:
        """Apply repetition (prompt and output), frequency and presence (output only) penalties."""
        assert stages.penalties is not None
        batch, state = stages.penalties.batch, self._state
        floats = packed.view(torch.float32)
        for rows, table in _table_chunks(batch, stages.penalties.table, work):
            part, settings = _take(work, rows), _take(floats, rows)
            counts = state.counts.index_select(0, table)
            times = counts.bitwise_and(MOST_COUNTED)
            factor = torch.where(
                part > 0,
                settings[:, Column.INVERSE_REPETITION, None],
                settings[:, Column.REPETITION, None],
            )
            part.mul_(factor.masked_fill_(counts == 0, 1.0))
            part.sub_(times * settings[:, Column.FREQUENCY, None])
            part.sub_((times > 0) * settings[:, Column.PRESENCE, None])
            _put(work, rows, part)

    # ------------------------------------------------------------ the choice

    def _choose(
        self,
        logits: torch.Tensor,
        stages: StepStages,
        packed: torch.Tensor,
        lengths: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """→ token_ids [R] int64, bad_rows [R] bool"""
        lanes = packed[:, Column.LANES :]
        keys = self._noise.row_keys(lanes, lengths)
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
            for rows in _chunks(group, logits):
                settings, row_keys = _take(floats, rows), _take(keys, rows)
                scaled = _take(logits, rows) * settings[:, Column.INVERSE_TEMPERATURE, None]
                scaled = scaled.to(torch.float32)  # Only float64 logits are wider.
                if k is None:
                    chosen, bad = self._choose_plain(scaled, settings, row_keys, stages.any_min_p)
                else:
                    top_k = _take(packed, rows)[:, Column.TOP_K]
                    chosen, bad = self._choose_ranked(scaled, top_k, settings, row_keys, k)
                _put(token_ids, rows, chosen)
                _put(bad_rows, rows, bad)
        return token_ids, bad_rows

    def _choose_plain(
        self, scaled: torch.Tensor, floats: torch.Tensor, keys: torch.Tensor, any_min_p: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if any_min_p:
            least = scaled.amax(dim=-1, keepdim=True) + floats[:, Column.LOG_MIN_P, None]
            scaled.masked_fill_(scaled < least, -_INF)
        noise = self._noise.exponential(keys)
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
        """Filter and choose among the k largest, in order."""
        peak = scaled.amax(dim=-1, keepdim=True)
        values, ids = top_tokens(scaled, k)
        ranks = torch.arange(k, device=scaled.device)
        dropped = ranks >= top_k.unsqueeze(1)
        dropped.logical_or_(values < peak + floats[:, Column.LOG_MIN_P, None])
        values.masked_fill_(dropped, -_INF)
        probs = torch.softmax(values, dim=-1, dtype=torch.float64)
        before = probs.cumsum(dim=-1).sub_(probs)
        values.masked_fill_(before >= floats[:, Column.TOP_P, None], -_INF)
        values.sub_(self._noise.exponential(keys, ids).log_())
        place = values.argmax(dim=-1, keepdim=True)
        return ids.gather(1, place).squeeze(1), peak.squeeze(1).isfinite().logical_not_()

    # ------------------------------------------------------------ log-probabilities

    def _logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, stages: StepStages
    ) -> Logprobs | None:
        if stages.logprobs is None:
            return None
        return self._spread_logprobs(logits, token_ids, stages.logprobs, stages.max_logprobs)

    def _spread_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, rows: Rows, k: int
    ) -> Logprobs:
        if rows.batch is None:
            return token_logprobs(logits, token_ids, k)
        some = token_logprobs(
            logits.index_select(0, rows.batch), token_ids.index_select(0, rows.batch), k
        )
        spread = [
            part.new_zeros((len(token_ids), *part.shape[1:])).index_copy_(0, rows.batch, part)
            for part in (some.top_ids, some.top_logprobs, some.logprob, some.rank)
        ]
        return Logprobs(*spread)

    def prompt_logprobs(self, logits: torch.Tensor, targets: torch.Tensor, k: int) -> Logprobs:
        """logits: [T, vocab_size]; targets: [T] int64, the token after each position; k: number of
        top tokens, -1 for the whole vocabulary."""
        k = logits.shape[1] if k < 0 else min(k, logits.shape[1])
        if not self._operations.samples or k > MOST_TOP_TOKENS:
            return token_logprobs(logits, targets, k)
        state = self._state
        if self._scoring is None:
            settings = np.zeros((MOST_TOP_TOKENS + 1, NUM_COLUMNS), dtype=np.int32)
            settings[:, Column.FLAGS] = int(Flag.FORCED | Flag.LOGPROBS)
            settings[:, Column.NUM_LOGPROBS] = np.arange(MOST_TOP_TOKENS + 1)
            self._scoring = torch.from_numpy(settings).to(state.device)
        tables = self._tables._replace(settings=self._scoring)
        out = sample_outputs(len(targets), state.device)
        slots = torch.full((len(targets),), k, dtype=torch.int64, device=state.device)
        for start in range(0, len(targets), SCORED_ROWS):
            rows = slice(start, start + SCORED_ROWS)
            self._operations.sample(
                logits[rows], slots[rows], targets[rows], tables,
                SampleOutputs(*(part[rows] for part in out)), plain=False, skip=int(Flag.FILTER),
            )  # fmt: skip
        return Logprobs(out.top_ids[:, :k], out.top_logprobs[:, :k], out.logprob, out.rank)


def sample_outputs(num_rows: int, device: torch.device) -> SampleOutputs:
    """Allocate result buffers for this many rows."""
    ids, floats = torch.int32, torch.float32
    return SampleOutputs(
        chosen=torch.zeros(num_rows, dtype=ids, device=device),
        top_ids=torch.zeros((num_rows, MOST_TOP_TOKENS), dtype=ids, device=device),
        top_logprobs=torch.zeros((num_rows, MOST_TOP_TOKENS), dtype=floats, device=device),
        logprob=torch.zeros(num_rows, dtype=floats, device=device),
        rank=torch.zeros(num_rows, dtype=ids, device=device),
    )


def _bits(mask: TokenMask | None) -> GrammarBits | None:
    return None if mask is None else GrammarBits(mask.bits, mask.places)


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> Logprobs:
    """Log-softmax in float32 of logits [N, V] at token_ids [N] and the k most likely tokens.

    Works through chunks of rows, so that the float32 temporaries stay bounded.
    """
    count, vocab_size = logits.shape
    k = min(k, vocab_size)
    top_ids = token_ids.new_empty((count, k))
    top_logprobs = logits.new_empty((count, k), dtype=torch.float32)
    logprob = logits.new_empty(count, dtype=torch.float32)
    rank = token_ids.new_empty(count)
    for rows in _slices(count, vocab_size):
        raw = logits[rows].to(torch.float32)
        total = raw.logsumexp(dim=-1, keepdim=True)
        own = raw.gather(1, token_ids[rows].unsqueeze(1))
        rank[rows].copy_((raw > own).sum(dim=-1).add_(1))
        logprob[rows].copy_((own - total).squeeze(1))
        if k:
            values, ids = top_tokens(raw, k)
            top_logprobs[rows].copy_(values.sub_(total))
            top_ids[rows].copy_(ids)
    return Logprobs(top_ids, top_logprobs, logprob, rank)


def top_tokens(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest of float32 values [N, V], largest first, equal values by ascending id.

    → values [N, k], ids [N, k] int64. `torch.topk` does not define which of equal values it takes,
    and bfloat16 logits have many. So each sort key is a unique int64: the bits of the float, mapped
    so that integer order is float order, then the id, reversed.
    """
    vocab_size = values.shape[1]
    # -0.0 becomes 0.0: the two are equal and must be ordered by id.
    bits = values.add(0.0).contiguous().view(torch.int32)
    ordered = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    reversed_ids = torch.arange(vocab_size - 1, -1, -1, device=values.device)
    keys = torch.add(reversed_ids, ordered, alpha=1 << 32)
    if k < vocab_size:
        keys = keys.topk(k, dim=-1).values
    else:
        keys = keys.sort(dim=-1, descending=True).values
    ids = (vocab_size - 1) - keys.bitwise_and_(0xFFFFFFFF)
    return values.gather(1, ids), ids


def _ban_stops(
    work: torch.Tensor, rows: StopRows, packed: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Mask stop ids while the output has fewer than min_tokens tokens."""
    settings = _select(packed, rows)
    num_output = _select(lengths, rows) - settings[:, Column.PROMPT_LEN]
    early = num_output < settings[:, Column.MIN_TOKENS]
    _ban(work, rows, rows.stop_ids, early.unsqueeze(1))


def _ban(work: torch.Tensor, rows: Rows, token_ids: torch.Tensor, active: torch.Tensor) -> None:
    """Set logits at token_ids [count, n] to -inf where active [count, n or 1]; ids below 0 are
    padding."""
    batch = rows.batch
    if batch is None:
        batch = torch.arange(rows.count, device=work.device)
    places = batch.unsqueeze(1) * work.shape[1] + token_ids.clamp(min=0)
    limits = torch.where(active & (token_ids >= 0), -_INF, _INF).to(work.dtype)
    work.view(-1).scatter_reduce_(0, places.view(-1), limits.view(-1), "amin")


def _select(values: torch.Tensor, rows: Rows) -> torch.Tensor:
    return values if rows.batch is None else values.index_select(0, rows.batch)


def _take(values: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Return a view for a slice, a copy for indices."""
    return values[rows] if isinstance(rows, slice) else values.index_select(0, rows)


def _put(target: torch.Tensor, rows: slice | torch.Tensor, part: torch.Tensor) -> None:
    """Write rows back; a view from `_take` that was changed in place needs no copy."""
    if not isinstance(rows, slice):
        target.index_copy_(0, rows, part)
    elif target[rows].data_ptr() != part.data_ptr():
        target[rows].copy_(part)


def _slices(count: int, width: int) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // width)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _chunks(rows: Rows, work: torch.Tensor) -> Iterator[slice | torch.Tensor]:
    """Yield the rows as indices into `work`, in chunks that bound the size of temporaries."""
    for part in _slices(rows.count, work.shape[1]):
        yield part if rows.batch is None else rows.batch[part]


def _table_chunks(
    batch: torch.Tensor | None, table: torch.Tensor, work: torch.Tensor
) -> Iterator[tuple[slice | torch.Tensor, torch.Tensor]]:
    for part in _slices(table.shape[0], work.shape[1]):
        yield (part if batch is None else batch[part]), table[part]
