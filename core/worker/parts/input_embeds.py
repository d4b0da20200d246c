"""Encodes items of prompts, and places the rows among those of tokens."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...config import EngineConfig
from ...errors import ConfigError
from ...media.largest import largest_items
from ...nn.input_embeds import EmbeddedRows, InputEmbedsContext, RopePositions
from ...nn.sdpa import without_plans
from ...nn.spans import Span
from ...parts.input_embeds import NAME, InputEmbedsPlan, ItemToEncode, SlotItems
from ...parts.media import ROWS, MediaTensor, PlacedItem
from ...protocols.attention import PagedBackend
from ...protocols.media import ProcessedMedia, Spans
from ...step import NOTHING_IN_PROCESS, InProcess, PartPlan, SlotStart, StepPlan
from ..batch import PersistentBatch, StepInputs
from ..graphs.encoder_graphs import EncoderGraphs, Kind, uploaded
from ..graphs.recorder import Recorder
from ..launched_step import LaunchedStep
from .part import PartNeeds, PartSite, PartStart, Report, StartContext, WorkerPart

logger = logging.getLogger("jackfield.worker")

RECORDED_SHARE = 4
"""Of the rows that a plan encodes, recorded encodings have one in so many at most: the memory that
they take stays taken, and launches of many rows take the device longer than the host."""


class InputEmbedsStart(PartStart):
    """Uses the model's encoder of media, if it has one."""

    option = "limit_mm_per_prompt"

    def __init__(self, start: StartContext) -> None:
        self._start = start
        self._encoder: Any = getattr(start.model, "media", NoEncoder())
        self._width = (1 + self._encoder.num_levels) * start.model_config.hidden_size
        assert start.config.max_num_batched_tokens is not None
        self._budget = start.config.max_num_batched_tokens
        media = start.model_config.media  # None: prompts are embeddings, of a text model.
        self._spans = None if media is None else media.spans
        if self._spans is not None:
            _check_span_options(start.config)
        self.needs = PartNeeds(
            later_bytes=self._budget * self._width * start.model_config.dtype.itemsize,
            refuses=None if self._spans is None else _span_refusal,
        )

    def make(self, site: PartSite) -> InputEmbeds:
        return self.make_pooling(site.batch)

    def make_pooling(self, batch: PersistentBatch) -> InputEmbeds:
        config = self._start.model_config
        return InputEmbeds(
            self._encoder, batch, config.hidden_size, config.dtype,
            spans=self._spans, budget=self._budget, largest=self._largest,
        )  # fmt: skip

    def _largest(self, max_tokens: int | None) -> list[ProcessedMedia]:
        """Return the largest item of each modality that requests may send, or of so many tokens.
        Blocks."""
        own = self._start
        return largest_items(own.config, own.model_config, own.plugins, max_tokens)

    def complete(self, num_blocks: int) -> Mapping[str, Any]:
        return {"row_width": self._width}


SPANS = "tokens of prompts of this model see each other"


def _check_span_options(config: EngineConfig) -> None:
    """Raise ConfigError for options with which the tokens of a span are not computed together, or
    not found by their positions."""
    for name, reason in (
        ("kv_compression", "so its place in the cache must be that in the prompt"),
        ("kv_compression_levels", "so its place in the cache must be that in the prompt"),
        ("long_prefill_token_threshold", "so they are computed in one step"),
    ):
        if getattr(config, name):
            raise ConfigError(
                f"{name}: {SPANS}, {reason}; leave it out, or serve text alone with "
                "language_model_only",
                param=name,
            )


def _span_refusal(backend: type[PagedBackend]) -> str | None:
    if getattr(backend, "standard_cache", False):
        return None
    return f"its cache has a form of its own, and {SPANS}"


class NoEncoder:
    """Of a model that reads text, and embeddings that are given."""

    num_levels = 0
    rope = None

    def encode(self, items: Sequence[Any]) -> Sequence[torch.Tensor]:
        raise ValueError("this model has no encoder")


class _Slot:
    """Items of a slot's request that its rows have not passed."""

    def __init__(self, own: SlotItems, computed: int) -> None:
        self.items = own.items
        self.computed = computed
        """Tokens of plans so far."""
        self.prompt_span = own.prompt_span
        self.end = max(self.prompt_span, *(item.end for item in own.items[-1:]), 0)
        self.axes: np.ndarray | None = None
        """[3, prompt] positions of a model that rotates by place."""


class InputEmbeds(WorkerPart):
    name = NAME

    def __init__(
        self,
        encoder: Any,
        batch: PersistentBatch,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        spans: Spans | None,
        budget: int,
        largest: Callable[[int | None], Sequence[ProcessedMedia]],
    ) -> None:
        """budget: rows that a plan encodes, if it is not one item; largest: makes the largest items
        that requests may send, or of so many tokens."""
        self._encoder = encoder
        self._budget = budget
        self._make_largest = largest
        self._recorded_rows = budget // RECORDED_SHARE
        """Rows of a graph."""
        self._largest: list[Kind] = []
        """The largest items that requests may send."""
        self._expected: list[Kind] = []
        """Those that graphs encode: of modalities whose items are of one size, or small."""
        self.graphs: EncoderGraphs | None = None
        """None: encodings are launched."""
        self._batch = batch
        self._width = (1 + encoder.num_levels) * hidden_size
        self._dtype = dtype
        self._outputs: dict[str, torch.Tensor] = {}
        """Digest → [rows, width]"""
        self._failures: dict[str, str] = {}
        """Digest → why it could not be encoded."""
        self._slots: dict[int, _Slot] = {}
        self._kind = spans
        self._spans: list[Span] = []
        self._rows: EmbeddedRows | None = None
        self._axes: tuple[torch.Tensor, torch.Tensor] | None = None
        """Tokens of the step, [K], and their positions, [3, K]."""
        self._failed: dict[int, str] = {}
        """Rows of the step → why they have nothing to compute with."""
        self._deltas: torch.Tensor | None = None
        if encoder.rope is not None:
            count = batch.num_slots + 1
            self._deltas = torch.zeros(count, dtype=torch.int64, device=batch.device)
        self._turned: set[int] = set()
        """Slots whose delta is not 0."""
        self._turns = False
        """Some tokens of the step turn by other positions than those in the sequence."""
        self._records = False
        """Steps are recorded, for any slots."""

    def run_largest(self) -> int:
        """Encode the largest item of each modality, as many of them as one plan may encode."""
        most_rows = self._budget
        self._largest = [self._encode_many(item, most_rows) for item in self._make_largest(None)]
        for kind in self._largest:
            most_rows = max(most_rows, kind.num_rows)
        return most_rows * self._width * self._dtype.itemsize

    def run_largest_recorded(self) -> None:
        """Encode what graphs encode at most."""
        share = self._recorded_rows
        kinds = [self._encode_many(item, share) for item in self._make_largest(share)]
        self._expected = [kind for kind in kinds if kind in self._largest]
        self._recorded_rows = max([share, *(kind.num_rows for kind in kinds)])

    def _encode_many(self, item: ProcessedMedia, most_rows: int) -> Kind:
        """Encode an item alone, then as often as there are so many rows; return its kind."""
        tensors = {name: MediaTensor.of(np.asarray(v)) for name, v in item.tensors.items()}
        [rows] = self._launch([self._uploaded(tensors)])
        num_rows = len(rows)
        del rows
        if (count := most_rows // num_rows) > 1:
            self._launch([self._uploaded(tensors) for _ in range(count)])
        return Kind.of(tensors, num_rows)

    def _launch(self, items: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Encode items. Modules of `transformers` call torch's attention themselves."""
        with without_plans():
            encoded: Sequence[torch.Tensor] = self._encoder.encode(items)
            return encoded

    def encoder_graphs(self, record: Recorder) -> EncoderGraphs | None:
        """Return graphs of encodings, which are used from here on; None: there is no encoder.
        Nothing is recorded yet."""
        if isinstance(self._encoder, NoEncoder):
            return None
        self.graphs = EncoderGraphs(self._launch, record, self._batch.device, self._recorded_rows)
        self.graphs.expect(self._expected)
        return self.graphs

    def weights_changed(self) -> None:
        if self.graphs is not None:
            self.graphs.forget()

    # ------------------------------------------------------------ slots

    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        self.release(start.slot)
        own: SlotItems | None = start.parts.get(NAME)
        if own is None:
            return
        slot = _Slot(own, start.num_computed_tokens)
        if self._deltas is not None:
            slot.axes, delta = self._encoder.positions(own.items, start.num_prompt_tokens)
            if delta:
                self._deltas[start.slot].fill_(delta)
                self._turned.add(start.slot)
        if slot.computed < slot.end:
            self._slots[start.slot] = slot

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)
        if slot in self._turned:
            assert self._deltas is not None
            self._turned.remove(slot)
            self._deltas[slot].fill_(0)

    # ------------------------------------------------------------ a step

    def before(self, part: PartPlan | None, plan: StepPlan) -> None:
        self._rows, self._axes, self._failed, self._spans = None, None, {}, []
        if isinstance(part, InputEmbedsPlan):
            self._encode(part)
        if self._slots and not self._slots.keys().isdisjoint(plan.slots):
            self._place(plan)
        self._turns = self._axes is not None or not self._turned.isdisjoint(plan.slots)

    def _encode(self, plan: InputEmbedsPlan) -> None:
        for digest in tuple(self._outputs) if plan.drop_all else plan.drop:
            self._outputs.pop(digest, None)
            self._failures.pop(digest, None)
        if plan.drop_all:
            self._failures.clear()
        if len(plan.encode) > 1:
            try:
                outputs = self._encoded(plan.encode)
            except Exception as error:
                # One of them is at fault, or they are too many for the memory.
                logger.info("items are encoded one by one: %s: %s", type(error).__name__, error)
            else:
                self._outputs |= zip((item.digest for item in plan.encode), outputs, strict=True)
                return
        for item in plan.encode:
            # An item that cannot be encoded costs its requests alone.
            try:
                [self._outputs[item.digest]] = self._encoded([item])
            except Exception as error:
                logger.exception("an item could not be encoded")
                self._failures[item.digest] = f"{type(error).__name__}: {error}"

    def _encoded(self, items: Sequence[ItemToEncode]) -> list[torch.Tensor]:
        """Return the rows of items, encoded together but for those that are given as rows."""
        tensors = [self._uploaded(item.tensors) for item in items]
        encoded: Iterator[torch.Tensor] = iter(())
        if others := [n for n, own in enumerate(tensors) if ROWS not in own]:
            own = [tensors[number] for number in others]
            if self.graphs is None:
                encoded = iter(self._launch(own))
            else:
                kinds = [Kind.of(items[n].tensors, items[n].num_rows) for n in others]
                encoded = iter(self.graphs.encode(own, kinds))
        outputs: list[torch.Tensor] = []
        for item, given in zip(items, tensors, strict=True):
            rows = given.get(ROWS)
            if rows is None:
                rows = next(encoded)
            if rows.shape != (item.num_rows, self._width):
                raise ValueError(
                    f"the encoder returned {tuple(rows.shape)} for {item.num_rows} tokens of "
                    f"{self._width} numbers"
                )
            outputs.append(rows.to(self._dtype))
        return outputs

    def _uploaded(self, tensors: Mapping[str, MediaTensor]) -> dict[str, torch.Tensor]:
        return {name: uploaded(tensor, self._batch.device) for name, tensor in tensors.items()}

    def _place(self, plan: StepPlan) -> None:
        """Find the rows of outputs, and the positions, of the step's tokens of items."""
        tokens: list[np.ndarray] = []
        vectors: list[torch.Tensor] = []
        turned: list[np.ndarray] = []
        axes: list[np.ndarray] = []
        first = 0
        for row, (number, count) in enumerate(zip(plan.slots, plan.num_tokens, strict=True)):
            slot = self._slots.get(number)
            if slot is not None:
                begin = slot.computed
                slot.computed = end = begin + count
                if begin < slot.prompt_span:
                    assert end >= slot.prompt_span, "the tokens of a prompt are computed together"
                    self._spans.append(Span(row, first, begin, slot.prompt_span))
                for item in slot.items:
                    if item.start < end and begin < item.end:
                        self._take(row, item, begin, end, first, tokens, vectors)
                if slot.axes is not None:
                    known = min(end, slot.axes.shape[1])
                    turned.append(np.arange(first, first + known - begin))
                    axes.append(slot.axes[:, begin:known])
                if end >= slot.end:
                    del self._slots[number]
            first += count
        if tokens:
            places = torch.from_numpy(np.concatenate(tokens)).to(self._batch.device)
            self._rows = EmbeddedRows(places, torch.cat(vectors))
        if turned:
            moved = torch.from_numpy(np.concatenate(turned)).to(self._batch.device)
            positions = torch.from_numpy(np.concatenate(axes, axis=1)).to(self._batch.device)
            self._axes = moved, positions

    def _take(
        self,
        row: int,
        item: PlacedItem,
        begin: int,
        end: int,
        first: int,
        tokens: list[np.ndarray],
        vectors: list[torch.Tensor],
    ) -> None:
        """Take the part of an item's output that stands at positions begin .. end - 1 of a row,
        whose first token is the step's token `first`."""
        output = self._outputs.get(item.digest)
        if output is None:
            reason = self._failures.get(item.digest, "it was not encoded")
            self._failed[row] = f"an item of the prompt could not be encoded: {reason}"
            return
        at = 0
        for offset, count in item.runs:
            start = max(item.start + offset, begin)
            stop = min(item.start + offset + count, end)
            if start < stop:
                tokens.append(np.arange(first + start - begin, first + stop - begin))
                skipped = at + start - item.start - offset
                if self._kind in (Spans.ALL, Spans.WINDOWED):
                    span_end = item.start + offset + count
                    assert stop == span_end, "the tokens of a span are computed together"
                    self._spans.append(Span(row, first + start - begin, start, span_end))
                vectors.append(output[skipped : skipped + stop - start])
            at += count

    @contextlib.contextmanager
    def recording(self, variant: str | None) -> Iterator[None]:
        before, self._records = self._records, True
        try:
            yield
        finally:
            self._records = before

    def context(self, inputs: StepInputs) -> InputEmbedsContext | None:
        """Return nothing for a launched step of texts alone."""
        rope = None
        if self._deltas is not None and (self._turns or self._records):
            rope = RopePositions(self._positions(inputs), self._encoder.rope)
        if rope is None and self._rows is None and not self._spans:
            return None
        windowed = self._kind is Spans.WINDOWED
        return InputEmbedsContext(
            self._rows, rope, tuple(self._spans), self._batch.block_size, windowed=windowed
        )

    def _positions(self, inputs: StepInputs) -> torch.Tensor:
        """Return the positions by which tokens turn, [T] or [3, T]."""
        assert self._deltas is not None
        count, slots = len(inputs.input_ids), inputs.slots
        if len(slots) != count:
            ends = inputs.layout.query_start[1:].contiguous()
            numbers = torch.arange(count, dtype=ends.dtype, device=ends.device)
            rows = torch.searchsorted(ends, numbers, right=True)
            slots = slots[rows.clamp_(max=len(slots) - 1)]
        positions = inputs.positions + self._deltas.index_select(0, slots)
        if self._axes is None:
            return positions
        tokens, axes = self._axes
        return positions.expand(3, -1).index_copy(1, tokens, axes)

    def recordable(self, plan: StepPlan) -> bool:
        return not (self._rows or self._axes or self._spans or self._failed)

    def after(self, part: PartPlan | None, step: LaunchedStep) -> Report | None:
        step.failed.update(self._failed)
        self._rows, self._axes, self._failed, self._spans = None, None, {}, []
        return None
