"""Operations of a step besides its layers, by Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from ...core.nn.step_operations.compaction import CacheMoves, CompactionOperations
from ...core.nn.step_operations.drafts import DraftOperations
from ...core.nn.step_operations.inputs import DecodeTensors, InputOperations, StepTensors
from ...core.nn.step_operations.sampling import (
    GrammarBits,
    SampleOutputs,
    SamplingOperations,
    SlotTables,
)
from ...kernels.compaction.best_tokens import best_tokens
from ...kernels.compaction.compact_caches import compact_caches
from ...kernels.compaction.move_levels import move_levels
from ...kernels.sampling.edit_logits import edit_logits
from ...kernels.sampling.mask_tokens import mask_tokens
from ...kernels.sampling.sample_gumbel import best_of_parts, choose_best, sample_gumbel
from ...kernels.sampling.sample_tokens import sample_tokens
from ...kernels.step.decode_inputs import decode_inputs
from ...kernels.step.drafts import keep_drafts, verify_drafts
from ...kernels.step.step_inputs import advance, scatter, slot_mappings, step_inputs
from ...kernels.step.written_tokens import write_tokens


class TritonSteps(InputOperations, SamplingOperations, CompactionOperations, DraftOperations):
    """One launch each, two or six for sampling."""

    samples: ClassVar[bool] = True
    writes_tokens: ClassVar[bool] = True

    advance = staticmethod(advance)
    slot_mappings = staticmethod(slot_mappings)
    scatter = staticmethod(scatter)
    best_tokens = staticmethod(best_tokens)
    move_levels = staticmethod(move_levels)
    verify_drafts = staticmethod(verify_drafts)
    keep_drafts = staticmethod(keep_drafts)
    edit_logits = staticmethod(edit_logits)
    write_tokens = staticmethod(write_tokens)
    mask_tokens = staticmethod(mask_tokens)

    def decode_inputs(
        self,
        packed: torch.Tensor,
        lengths: torch.Tensor,
        token_history: torch.Tensor,
        block_table: torch.Tensor,
        row_tables: torch.Tensor,
        block_size: int,
        dropped: torch.Tensor | None = None,
    ) -> DecodeTensors:
        return DecodeTensors(
            *decode_inputs(
                packed, lengths, token_history, block_table, row_tables, block_size, dropped
            )
        )

    def step_inputs(
        self,
        query_start: torch.Tensor,
        slots: torch.Tensor,
        sample_slots: torch.Tensor,
        num_tokens: int,
        lengths: torch.Tensor,
        token_history: torch.Tensor,
        block_table: torch.Tensor,
        block_size: int,
        dropped: torch.Tensor | None = None,
    ) -> StepTensors:
        tokens, rows, seq_lens, tables = step_inputs(
            query_start, slots, sample_slots, num_tokens, lengths, token_history, block_table,
            block_size, dropped,
        )  # fmt: skip
        (ids, positions, places), (sampled, ends, last) = tokens, rows
        return StepTensors(ids, positions, places, sampled, ends, last, seq_lens, tables)

    def compact_caches(self, caches: Sequence[torch.Tensor], moves: CacheMoves) -> None:
        """One launch for all layers of one shape."""
        first = caches[0]
        alike = (first.shape, first.stride(), first.dtype)
        if any((cache.shape, cache.stride(), cache.dtype) != alike for cache in caches):
            for number, cache in enumerate(caches):
                chosen = moves.chosen[number : number + 1]
                self.compact_caches([cache], moves._replace(chosen=chosen))
            return
        compact_caches(
            caches, moves.slots, moves.starts, moves.chosen, moves.block_table, moves.targets,
            max(moves.counts),
        )  # fmt: skip

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        tables: SlotTables,
        out: SampleOutputs,
        *,
        plain: bool,
        grammar: GrammarBits | None = None,
        skip: int = 0,
    ) -> None:
        """Plain rows take two launches, any others six."""
        if plain:
            sample_gumbel(logits, tables.settings, slots, lengths, tables.history, out.chosen)
        else:
            sample_tokens(logits, slots, lengths, tables, out, grammar=grammar, skip=skip)

    def sample_parts(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        tables: SlotTables,
        first: int,
    ) -> torch.Tensor:
        return best_of_parts(logits, tables.settings, slots, lengths, first)

    def sample_best(
        self,
        best: torch.Tensor,
        token: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        tables: SlotTables,
        out: SampleOutputs,
    ) -> None:
        choose_best(best, token, slots, lengths, tables.history, out.chosen)
