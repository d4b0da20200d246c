"""Suffix decoding: proposes what most often followed the last tokens, in the request's own text and
in the outputs of earlier requests.

As in SuffixDecoding (Oliaro et al. 2024) and Arctic Inference, whose option names it has: a match
of m last tokens proposes up to `m * suffix_decoding_max_spec_factor` tokens, each the most frequent
one among the matches that agree so far, until the product of their shares falls below
`suffix_decoding_min_token_prob`. Of all m, that with the largest sum of these products wins; those
in earlier outputs, and in the text that the caller has predicted, only if theirs is larger. Instead
of trees there are hash tables of places on the device (`suffix_tables`), so that tokens need not
come to the host, and memory does not grow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from ...core.protocols.speculators import (
    Drafts,
    KnownTokens,
    RequestText,
    Speculator,
    SpeculatorSetup,
)
from . import suffix_tables
from .suffix_tables import SIZES, WAYS, Rows, Rule, Text

try:
    from ...kernels.step import suffix_drafts as kernels

    _launches = True
except ImportError:
    _launches = False

DEFAULT_DEPTH = 24
CACHED_REQUESTS = 10000
MOST_CELLS = 65536
"""Places that are kept of one request's text: 256 KiB per slot."""
MOST_SHARED_TOKENS = 1048576
"""Tokens of earlier outputs: 12 MiB, and 16 MiB for their places."""
SHARED_TOKENS_PER_REQUEST = 512
"""Room per cached request, up to `MOST_SHARED_TOKENS`."""
LAST_PLACE = 1 << 30
"""Shared tokens after which places are counted from 0 again, and all earlier ones forgotten."""


class SuffixOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of `speculative_config`; names and defaults are vLLM's."""

    suffix_decoding_max_tree_depth: Annotated[
        int, Meta(ge=2, le=64, description="Most tokens of a match and its drafts together.")
    ] = DEFAULT_DEPTH
    suffix_decoding_max_cached_requests: Annotated[
        int,
        Meta(
            ge=0,
            description="Ended requests whose outputs are searched, the latest ones; 0: none. They "
            "are also limited to 512 tokens for each of these requests, and 1048576 in all.",
        ),
    ] = CACHED_REQUESTS
    suffix_decoding_max_spec_factor: Annotated[
        float, Meta(ge=0, description="Most drafts per matched token.")
    ] = 1.0
    suffix_decoding_min_token_prob: Annotated[
        float, Meta(ge=0, le=1, description="Least estimated probability of a draft.")
    ] = 0.1


class Suffix(Speculator):
    options = SuffixOptions

    @classmethod
    def default_drafts(cls, config: Mapping[str, Any]) -> int:
        return DEFAULT_DEPTH

    def __init__(self, setup: SpeculatorSetup) -> None:
        options = setup.options
        assert isinstance(options, SuffixOptions)
        self._device, num_rows = setup.device, setup.num_slots + 1
        self._launches = _launches and setup.device.type == "cuda"
        self._rule = Rule(
            depth=options.suffix_decoding_max_tree_depth,
            factor=options.suffix_decoding_max_spec_factor,
            least=options.suffix_decoding_min_token_prob,
            num_drafts=setup.num_drafts,
        )
        self._num_cells = min(MOST_CELLS, _power_of_2(2 * len(SIZES) * setup.max_model_len))
        self._cells = self._zeros(num_rows, self._num_cells)
        """[slots, cells] int32: places in each slot's own text."""
        self._sharing = self._zeros(num_rows, dtype=torch.int64)
        """[slots] `RequestText.sharing`"""
        self._started: dict[int, int] = {}
        """Slot → first position of its output that is not in the shared text."""
        self._new: dict[int, int] = {}
        """Slot → known tokens whose places are not in its table yet."""
        self._shares = options.suffix_decoding_max_cached_requests > 0
        self._max_texts = options.suffix_decoding_max_cached_requests or num_rows
        self._num_shared = min(MOST_SHARED_TOKENS, SHARED_TOKENS_PER_REQUEST * self._max_texts)
        self._shared_cells = _power_of_2(len(SIZES) * self._num_shared)
        self._shared = Text(
            tokens=torch.full((self._num_shared,), -1, dtype=torch.int32, device=self._device),
            cells=self._zeros(self._shared_cells),
            owners=self._zeros(self._num_shared, dtype=torch.int64),
        )
        self._private = self._zeros(num_rows, dtype=torch.int64)
        """[slots] The owner of a slot's prediction in the shared text; 0: it has none."""
        self._predicted: set[int] = set()
        """Slots with a prediction."""
        self._num_predictions = 0
        self._outputs: deque[int] = deque()
        """First places of outputs and predictions in the shared text, a ring."""
        self._end = 0
        """Place behind the last of them."""

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    # ------------------------------------------------------------ requests

    def start(self, request: RequestText) -> None:
        slot = request.slot
        self._cells[slot].zero_()
        self._sharing[slot].fill_(request.sharing)
        self._new[slot] = request.num_tokens
        # A resumed request's output was shared when it left its slot.
        self._started[slot] = request.num_tokens
        if request.prediction:
            self._predict(slot, (*request.prompt_end, *request.prediction))

    def _predict(self, slot: int, text: Sequence[int]) -> None:
        """Store a text that the request of one slot alone may find."""
        # Owners of outputs are not negative.
        self._num_predictions += 1
        self._private[slot].fill_(-self._num_predictions)
        self._predicted.add(slot)
        text = text[: self._num_shared - 1]
        tokens = torch.tensor(text, dtype=torch.int32)
        if self._device.type == "cuda":
            tokens = tokens.pin_memory().to(self._device, non_blocking=True)
        length = self._private.new_full((1,), len(text))
        self._store(tokens, length, self._private[slot : slot + 1])

    def release(self, tokens: KnownTokens, slot: int, num_tokens: int) -> None:
        self._new.pop(slot, None)
        first = self._started.pop(slot, num_tokens)
        first = max(first, num_tokens - (self._num_shared - 1))
        if slot in self._predicted:
            self._predicted.discard(slot)
            self._private[slot].zero_()
        if self._shares and num_tokens - first > SIZES[0]:
            output = tokens.history[slot, first:num_tokens]
            self._store(output, tokens.lengths - first, self._sharing[slot : slot + 1])

    def _store(self, tokens: torch.Tensor, length: torch.Tensor, owner: torch.Tensor) -> None:
        """Append tokens [n] to the shared text, of which the first `length` [1] are known."""
        size = len(tokens)
        begin, self._end = self._end, self._end + size + 1
        self._outputs.append(begin)
        if len(self._outputs) > self._max_texts:
            self._outputs.popleft()
        suffix_tables.append(self._shared, tokens, begin, length, owner)
        self._note(self._shared, self._shared_rows(owner, begin), size + 1)
        if self._end > LAST_PLACE:
            self._shared.cells.zero_()
            self._outputs.clear()
            self._end = 0

    # ------------------------------------------------------------ drafts

    def propose(self, tokens: KnownTokens) -> Drafts:
        own = Text(tokens.history.view(-1), self._cells.view(-1))
        for slot, num_tokens in self._new.items():
            # Its history has them by now, also if it gets no drafts with this step.
            slots = tokens.slots.new_full((1,), slot)
            lengths = tokens.lengths.new_full((1,), num_tokens - 1)
            self._note(own, self._own_rows(tokens.history, slots, lengths), num_tokens - 1)
        self._new.clear()
        rows = self._own_rows(tokens.history, tokens.slots, tokens.lengths)
        # All but the newest place, which is looked up.
        self._note(own, rows._replace(end=rows.end - 1), 1 + self._rule.num_drafts)
        others = [self._sharing] if self._shares else []
        others += [self._private] if self._predicted else []
        other_rows = [
            self._shared_rows(owners[tokens.slots], self._first_shared) for owners in others
        ]
        drafts = kernels.suffix_drafts if self._launches else suffix_tables.drafts
        return Drafts(*drafts(own, rows, self._shared, other_rows, self._rule))

    @property
    def _first_shared(self) -> int:
        """First place of the shared text that may still be found."""
        first = self._outputs[0] if self._outputs else self._end
        return max(first, self._end - self._num_shared)

    def _note(self, text: Text, rows: Rows, most: int) -> None:
        note = kernels.note_places if self._launches else suffix_tables.note_places
        if most:
            note(text, rows, most)

    def _own_rows(self, history: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor) -> Rows:
        nothing = torch.zeros_like(slots)
        return Rows(
            base=slots * history.stride(0),
            size=history.shape[1],
            cells=slots * self._num_cells,
            num_buckets=self._num_cells // WAYS,
            owners=nothing,
            first=nothing,
            end=lengths,
        )

    def _shared_rows(self, owners: torch.Tensor, first: int) -> Rows:
        nothing = torch.zeros_like(owners)
        return Rows(
            base=nothing,
            size=self._num_shared,
            cells=nothing,
            num_buckets=self._shared_cells // WAYS,
            owners=owners,
            first=nothing + first,
            end=nothing + self._end,
        )


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 1 else 1
