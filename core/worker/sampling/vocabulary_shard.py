"""Plain rows over ranks: each finds its tokens' best, so logits are not exchanged.

As noise depends only on (seed, position, token), the result is that of the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ...nn.embedding import Embedding
from ...nn.operations import Operations
from ...nn.step_operations.sampling import SampleOutputs, SlotTables
from ...parallel.ranks import Ranks
from ...protocols.models import HiddenStates
from .gumbel import TokenNoise
from .sampling_columns import Column
from .sampling_state import SamplingState

PARTS = "sample_parts.tokens"
"""Feature `Operations.sample_parts`."""


class VocabularyShard:
    """Samples greedy rows or those with a temperature, from this rank's logits."""

    def __init__(
        self,
        ranks: Ranks,
        heads: list[Embedding],
        state: SamplingState,
        noise: TokenNoise,
        operations: Operations,
    ) -> None:
        self._group, self._heads = ranks.tensor, heads
        self._state, self._noise, self._operations = state, noise, operations
        own = heads[0].own
        assert own is not None, "the ranks divide this vocabulary"
        start, stop = (min(end, state.vocab_size) for end in (own.start, own.stop))
        self.tokens = slice(start, stop)
        """This rank's token ids, perhaps none."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        ranks: Ranks,
        state: SamplingState,
        noise: TokenNoise,
        operations: Operations,
    ) -> VocabularyShard | None:
        """Return None if ranks have whole logits, or sampling kernels need them."""
        heads = [m for m in model.modules() if isinstance(m, Embedding) and m.own is not None]
        if not heads or (operations.samples and PARTS not in operations.features):
            return None
        return cls(ranks, heads, state, noise, operations)

    def logits(
        self, compute: Callable[[HiddenStates], torch.Tensor], hidden: HiddenStates
    ) -> torch.Tensor:
        """Call `compute` (`Model.compute_logits`) with heads that keep logits sharded → [num_rows,
        number of own tokens]
        """
        for head in self._heads:
            head.gathers = False
        try:
            return compute(hidden)[:, : self.tokens.stop - self.tokens.start]
        finally:
            for head in self._heads:
                head.gathers = True

    def sample_plain(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        out: SampleOutputs,
    ) -> None:
        """As `Sampler.sample_plain` on own tokens; all ranks agree."""
        state, rows = self._state, len(logits)
        tables = SlotTables(state.packed, state.counts, state.allowed, state.token_history)
        if self._operations.samples:
            first = self.tokens.start
            parts = self._operations.sample_parts(logits, slots, lengths, tables, first)
        else:
            parts = self._best(logits, slots, lengths)
        every = self._group.all_gather(parts.flatten(1)).view(rows, self._group.size, 2, -1)
        best = every[:, :, 0].flatten(1).contiguous().view(torch.float32)
        token = every[:, :, 1].flatten(1).contiguous()
        if self._operations.samples:
            self._operations.sample_best(best, token, slots, lengths, tables, out)
            return
        highest = best.amax(dim=1, keepdim=True)
        chosen = token.masked_fill(best != highest, state.vocab_size).amin(dim=1)
        bad = highest.squeeze(1).isfinite().logical_not_()
        state.token_history[slots, lengths] = chosen.masked_fill(bad, 0)
        out.chosen[:rows].copy_(chosen.masked_fill(bad, -1))

    def _best(
        self, logits: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """→ [num_rows, 2, 1] int32: bits of the best score (+inf for NaN), and its token"""
        best = logits.new_full((len(logits), 1), -float("inf"), dtype=torch.float32)
        token = torch.full_like(best, self._state.vocab_size, dtype=torch.int32)
        if logits.shape[1]:
            packed = self._state.packed.index_select(0, slots)
            floats = packed.view(torch.float32)
            keys = self._noise.row_keys(packed[:, Column.LANES :], lengths)
            scores = (logits * floats[:, Column.INVERSE_TEMPERATURE, None]).to(torch.float32)
            noise = self._noise.exponential(keys, own=self.tokens)
            # xlogy is exactly 0 where the weight is 0, so greedy rows keep their logits.
            scores.sub_(torch.special.xlogy(floats[:, Column.NOISE, None], noise))
            best, index = scores.max(dim=1, keepdim=True)
            best = best.masked_fill(best.isnan(), float("inf"))
            token = (index + self.tokens.start).int()
        return torch.stack([best.view(torch.int32), token], dim=1)
