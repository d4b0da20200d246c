"""The sampler: logits to tokens on the device, without synchronization.

Uses sampling kernels (`Operations.sample`), in a few recordable launches, else `TorchSampler`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ...config.output_options import LogprobsMode
from ...nn.operations import Operations
from ...nn.step_operations.sampling import GrammarBits, SampleOutputs, SlotTables
from ...parallel.ranks import Ranks
from ...step import NOTHING_IN_PROCESS, InProcess, SlotStart
from ..per_slot import PerSlot
from .logprobs import Logprobs, row_logprobs, token_logprobs
from .masks import TokenMask
from .processors import Processors
from .rejection import DrawnDrafts, leaving
from .sampling_columns import EDITS, MOST_TOP_TOKENS, NUM_COLUMNS, Column, Flag
from .sampling_state import SamplingState
from .step_stages import plain_stages
from .torch_sampler import TorchSampler, filtered
from .vocabulary_shard import VocabularyShard

SCORED_ROWS = 256
"""Prompt positions scored per launch."""


class Sampler(PerSlot):
    """Chooses one token per row. Order of stages: vLLM's (v1).

    Raw log-probabilities use the untouched logits (`EngineConfig.logprobs_mode`). Then: the
    grammar, allowed tokens and logit_bias, bad words, min_tokens (masks and finite biases commute),
    plugged-in processors, penalties, temperature, min_p, top_k, top_p, and the largest
    `logit + Gumbel noise`; greedy rows have none.

    The set kept by top_k and top_p is exact: tokens in order of (logit, then lower id); the first
    top_k; of these the smallest set whose probabilities, renormalised, reach top_p; always at least
    one.
    """

    def __init__(
        self,
        state: SamplingState,
        processors: Processors | None = None,
        operations: Operations | None = None,
        *,
        rows_per_slot: int = 1,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        """`rows_per_slot`: most rows of a slot per call. logprobs_mode: raw_logprobs with sampling
        kernels."""
        self._max_rows = state.num_slots * rows_per_slot
        self._state = state
        self._operations = operations or Operations()
        if self._operations.samples != state.kernels:
            raise ValueError("operations and sampling state must both be for kernels, or neither")
        self._outputs: SampleOutputs | None = None
        self._scoring: torch.Tensor | None = None
        self.processors = processors or Processors((), state.device)
        self.in_torch = TorchSampler(state, self.processors, self._operations, logprobs_mode)
        self.rejects = False
        """Whether drafts may come that are accepted by what they were drawn from."""
        self.shard: VocabularyShard | None = None
        """Samples plain rows from sharded logits."""

    def divide(self, model: nn.Module, ranks: Ranks) -> None:
        """Sample plain rows without exchanging logits, if ranks shard the head."""
        self.shard = VocabularyShard.of(
            model, ranks, self._state, self.in_torch.noise, self._operations
        )

    # ------------------------------------------------------------ slots

    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        processors = self.processors
        self._state.start(start, processed=bool(processors) and processors.start(start))

    def release(self, slot: int) -> None:
        self.processors.release(slot)
        self._state.release(slot)

    def upload(self) -> None:
        self._state.upload()

    def mask(self, logits: torch.Tensor, mask: TokenMask) -> None:
        """Mask logits [R, vocab_size] in place."""
        self._operations.mask_tokens(logits, mask.bits, mask.rows)

    # ------------------------------------------------------------ rows

    @property
    def padding_slot(self) -> int:
        """A slot of no request, whose rows may be computed."""
        return self._state.num_slots - 1

    @property
    def outputs(self) -> SampleOutputs:
        """The kernels' output buffers, at fixed addresses."""
        if self._outputs is None:
            self._outputs = sample_outputs(self._max_rows, self._state.device)
        return self._outputs

    def is_plain(self, rows_host: list[int]) -> bool:
        """Whether `sample_plain` serves these slots: at most a temperature."""
        if self._operations.samples:
            return not self._state.asked(rows_host)
        return self.is_plain_in_torch(rows_host)

    def is_plain_in_torch(self, rows_host: list[int]) -> bool:
        """As `is_plain` in torch, ignoring grammars; False with kernels."""
        if self._operations.samples:
            return False
        stages = self._state.plan(rows_host)
        processed = self._state.asked(rows_host) & Flag.PROCESSED
        return stages.graph_safe and not stages.any_min_p and not processed

    def recordable(self, rows_host: list[int]) -> bool:
        """Whether `sample_step` serves these slots in a graph: no grammar, no processor, at most 20
        top tokens.
        """
        if not self._operations.samples:
            return False
        return not self._state.asked(rows_host) & (Flag.GRAMMAR | Flag.PROCESSED | Flag.WIDE)

    def sample_plain(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        out: SampleOutputs,
        drafts: DrawnDrafts | None = None,
    ) -> None:
        """Sample greedy rows or those with a temperature; recordable. Arguments as for
        `TorchSampler.sample`; tokens go to the history, and to `out.chosen`, -1 in bad rows.
        """
        state = self._state
        if drafts is not None:
            packed = state.packed.index_select(0, slots)
            factors = packed.view(torch.float32)[:, Column.INVERSE_TEMPERATURE, None]
            logits = leaving(logits, drafts.tokens(logits * factors, packed, lengths))
        if self._operations.samples:
            self._operations.sample(logits, slots, lengths, self._tables, out, plain=True)
            return
        num_rows = logits.shape[0]
        sampled = self.in_torch.run(logits, plain_stages(num_rows), slots, lengths)
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
        """Sample `recordable` rows, or with `mask` those with a grammar; recordable.

        Tokens go to the history and to `out`, as in `Operations.sample`; the last slot is padding.
        Returns False, unchanged, without kernels.
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
        drafts: DrawnDrafts | None = None,
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """Sample any rows, not for graphs. Tokens go to the history. → chosen [R] int32, -1 in bad
        rows; log-probabilities, if requested. Arguments as for `TorchSampler.sample`.

        The next step may overwrite the result.
        """
        state = self._state
        if self.is_plain_in_torch(rows_host) and mask is None:
            out = self.outputs.first(len(rows_host))
            self.sample_plain(logits, slots, lengths, out, drafts)
            return out.chosen, None
        if not self._operations.samples:
            sampled = self.in_torch.sample(logits, slots, rows_host, lengths, mask, drafts)
            state.token_history[slots, lengths] = sampled.token_ids.int()
            return sampled.chosen, sampled.logprobs
        flags = state.asked(rows_host)
        out = self.outputs.first(len(rows_host))
        if mask is None and not flags:
            self.sample_plain(logits, slots, lengths, out, drafts)
            return out.chosen, None
        in_torch = bool(flags & Flag.PROCESSED) or drafts is not None
        late = in_torch or bool(flags & Flag.WIDE)
        if in_torch:
            self._launch_processed(logits, slots, rows_host, lengths, out, mask, drafts)
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
        drafts: DrawnDrafts | None = None,
    ) -> None:
        """Apply edits and processors, decide on drafts, then sample."""
        work = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        first, skip = EDITS & ~Flag.PENALTIES, Flag.LOGPROBS
        edit = self._operations.edit_logits
        edit(logits, slots, self._tables, work, edits=int(first), scale=False, grammar=_bits(mask))
        self.processors.apply(work, rows_host, lengths, invariant=False)
        if drafts is not None or self.processors.serves(rows_host, invariant=True):
            edit(work, slots, self._tables, work, edits=int(Flag.PENALTIES), scale=True)
            self.processors.apply(work, rows_host, lengths, invariant=True)
            skip |= EDITS | Flag.SCALED
        else:
            skip |= first
        if drafts is not None:
            packed = self._state.packed.index_select(0, slots)
            scores = work
            if self._state.asked(rows_host) & Flag.FILTER:
                scores = filtered(work, packed)
            work = leaving(work, drafts.tokens(scores, packed, lengths))
        self._launch(work, slots, lengths, out, None, skip)

    def precompile_processed(
        self, logits: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, out: SampleOutputs
    ) -> None:
        """Launch the kernels of a step with processors or drawn drafts, without any."""
        if self._operations.samples and (self.processors or self.rejects):
            self._launch_processed(logits, slots, [], lengths, out, None)

    def _late_logprobs(
        self, logits: torch.Tensor, rows_host: list[int], chosen: torch.Tensor
    ) -> Logprobs:
        """Compute requested log-probabilities after sampling, for any number of top tokens."""
        token_ids = chosen.clamp(min=0).to(torch.int64)
        return row_logprobs(logits, token_ids, *self._state.scored_rows(rows_host))

    # ------------------------------------------------------------ log-probabilities

    def prompt_logprobs(self, logits: torch.Tensor, targets: torch.Tensor, k: int) -> Logprobs:
        """logits: [T, vocab_size]; targets: [T] int64, the next tokens; k: top tokens, -1 for
        all.
        """
        k = logits.shape[1] if k < 0 else min(k, logits.shape[1])
        if not self._operations.samples or k > MOST_TOP_TOKENS:
            return token_logprobs(logits, targets, k, normalized=self.in_torch.normalized)
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
    """Allocate result buffers in one memory, for a single copy (`packing.to_host`)."""
    column = -(-num_rows // 4) * 4  # Each buffer begins at a multiple of 16 bytes.
    table = column * MOST_TOP_TOKENS
    memory = torch.zeros(3 * column + 2 * table, dtype=torch.int32, device=device)
    chosen, rank, logprob, ids, logprobs = memory.split([column, column, column, table, table])
    return SampleOutputs(
        chosen=chosen[:num_rows],
        top_ids=ids.view(-1, MOST_TOP_TOKENS)[:num_rows],
        top_logprobs=logprobs.view(torch.float32).view(-1, MOST_TOP_TOKENS)[:num_rows],
        logprob=logprob.view(torch.float32)[:num_rows],
        rank=rank[:num_rows],
    )


def _bits(mask: TokenMask | None) -> GrammarBits | None:
    return None if mask is None else GrammarBits(mask.bits, mask.places)
