"""Recorded encodings of items, by what they launch and how many they are."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...parts.media import MediaTensor
from .constants import DependsOnContents, HostConstants
from .recorder import WORTH_RECORDING, Recorder, Replay

logger = logging.getLogger("jackfield.worker")

MAX_GRAPHS = 32
"""Graphs that are kept; the least recently used one makes room."""
MAX_KINDS = 64
"""Kinds of items that are remembered for having been launched."""
MAX_KIND_BYTES = 1 << 18
"""Most bytes of sizes and masks; items with more are launched."""
WORTH_SPARE_TIME = 2
"""Launches from which a graph is recorded in spare time."""
CONTENTS = ("float32", "float16", "uint8")
"""Types of tensors whose numbers differ between items of a kind. What others say, such as sizes and
masks, decides what is launched."""
ALIGNMENT = 256
"""Alignment of tensors in a buffer, in bytes."""

Item = Mapping[str, torch.Tensor]


class Content(NamedTuple):
    """A tensor whose numbers differ."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class Kind(NamedTuple):
    """What items have in common that launch the same."""

    tensors: tuple[tuple[str, Content | MediaTensor], ...]
    num_rows: int

    @classmethod
    def of(cls, tensors: Mapping[str, MediaTensor], num_rows: int) -> Kind:
        own = (
            (name, Content(each.dtype, each.shape) if each.dtype in CONTENTS else each)
            for name, each in tensors.items()
        )
        return cls(tuple(own), num_rows)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names: of one modality."""
        return tuple(name for name, _ in self.tensors)

    @property
    def nbytes(self) -> int:
        """Of what is kept of it."""
        return sum(len(own.data) for _, own in self.tensors if isinstance(own, MediaTensor))

    @property
    def contents(self) -> dict[str, Content]:
        return {name: own for name, own in self.tensors if isinstance(own, Content)}


class Graph(NamedTuple):
    replay: Replay
    contents: tuple[torch.Tensor, ...]
    """Those of the first item in the order of its kind, then those of the next."""
    rows: torch.Tensor
    """[items, num_rows, width]"""
    constants: HostConstants


class EncoderGraphs:
    """Replays encodings that were recorded; others are launched, and recorded if they come again
    and again."""

    def __init__(
        self,
        encode: Callable[[Sequence[Item]], Sequence[torch.Tensor]],
        record: Recorder,
        device: torch.device,
        max_rows: int,
    ) -> None:
        """max_rows: of a graph, so that its memory is bounded."""
        self._encode, self._record, self._device = encode, record, device
        self._max_rows = max_rows
        self._graphs: OrderedDict[tuple[Kind, int], Graph] = OrderedDict()
        self._launches: OrderedDict[tuple[Kind, int], int] = OrderedDict()
        """Kind and number of items without a graph → how often they were launched."""
        self._refused: set[tuple[str, ...]] = set()
        """Names of tensors of items that cannot be recorded."""
        self._contents = torch.empty(0, dtype=torch.uint8, device=device)
        """Where the next graph finds what it encodes; earlier ones may have a smaller one."""
        self._rows = torch.empty(0, device=device)
        """Where it leaves rows; the same."""
        self.num_recorded = 0

    # ------------------------------------------------------------ encoding

    def encode(self, items: Sequence[Item], kinds: Sequence[Kind]) -> list[torch.Tensor]:
        """Return the rows of each item, [num_rows, width], in memory of their own."""
        alike: dict[Kind, list[int]] = {}
        for place, kind in enumerate(kinds):
            alike.setdefault(kind, []).append(place)
        rows: dict[int, torch.Tensor] = {}
        others: list[int] = []
        for kind, places in alike.items():
            while places:
                number = self._number(kind, len(places))
                some, places = places[: number or len(places)], places[number or len(places) :]
                graph = self._graph(kind, number) if number else None
                if graph is None:
                    others += some
                else:
                    rows.update(
                        zip(some, _replay(graph, kind, [items[n] for n in some]), strict=True)
                    )
        if others:
            rows.update(zip(others, self._encode([items[n] for n in others]), strict=True))
        return [rows[place] for place in range(len(items))]

    def _number(self, kind: Kind, count: int) -> int:
        """Return how many of so many items a graph encodes: a power of two; 0: none does."""
        if kind.names in self._refused or kind.nbytes > MAX_KIND_BYTES:
            return 0
        most = min(count, self._max_rows // kind.num_rows)
        return 1 << most.bit_length() - 1 if most else 0

    def _graph(self, kind: Kind, number: int) -> Graph | None:
        """Return the graph of so many items; None: they are launched."""
        key = kind, number
        if (graph := self._graphs.get(key)) is not None:
            self._graphs.move_to_end(key)
            return graph
        self._launches[key] = self._launches.get(key, 0) + 1
        self._launches.move_to_end(key)
        if len(self._launches) > MAX_KINDS:
            self._launches.popitem(last=False)
        return self.record(*key) if self._launches.get(key, 0) >= WORTH_RECORDING else None

    # ------------------------------------------------------------ recording

    def expect(self, kinds: Iterable[Kind]) -> None:
        """Note kinds of items that will come: they are recorded in spare time."""
        for kind in kinds:
            number = self._number(kind, self._max_rows)
            while number:
                self._launches[kind, number] = WORTH_SPARE_TIME
                number //= 2

    def record_next(self) -> bool:
        """Record one more of those that were launched more than once; return whether more are
        left."""
        due = [key for key, launches in self._launches.items() if launches >= WORTH_SPARE_TIME]
        if not due or len(self._graphs) >= MAX_GRAPHS:
            return False
        self.record(*due[-1])
        return len(due) > 1

    def record(self, kind: Kind, number: int) -> Graph | None:
        """Record the encoding of so many items; None: it cannot be."""
        began = time.monotonic()
        self._launches.pop((kind, number), None)
        try:
            graph = self._recorded(kind, number)
        except RuntimeError as error:
            self._refuse(kind, error)
            return None
        self._graphs[kind, number] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        self.num_recorded += 1
        seconds = time.monotonic() - began
        logger.debug("recorded %d items of %d rows in %.3f s", number, kind.num_rows, seconds)
        return graph

    def _refuse(self, kind: Kind, error: RuntimeError) -> None:
        self._refused.add(kind.names)
        for key in [key for key in self._launches if key[0].names == kind.names]:
            del self._launches[key]
        logger.info(
            "items with %s are encoded kernel by kernel, as that cannot be recorded: %s",
            ", ".join(kind.names), error,
        )  # fmt: skip

    def _recorded(self, kind: Kind, number: int) -> Graph:
        items = [self._item(kind, place) for place in self._places(kind, number)]
        contents = tuple(item[name] for item in items for name in kind.contents)
        constants = HostConstants(contents)
        outputs: list[torch.Tensor] = []
        failure: Exception | None = None
        try:
            constants.find(lambda: outputs.extend(self._encode(items)))
            rows = self._rows_of(outputs, kind)
        except DependsOnContents:
            raise  # On all ranks.
        except Exception as error:
            failure = error  # Other ranks wait to hear whether it was recorded.

        def encode() -> None:
            if failure is not None:
                raise RuntimeError(f"{type(failure).__name__}: {failure}") from failure
            for own, output in zip(rows, self._encode(items), strict=True):
                own.copy_(output)

        replay = self._record(lambda: constants.use(encode))
        return Graph(replay, contents, rows, constants)

    def _places(self, kind: Kind, number: int) -> list[dict[str, torch.Tensor]]:
        """Return memory for the contents of so many items, the same as earlier if it is enough."""
        sizes = [-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in kind.contents.values()]
        if len(self._contents) < (total := number * sum(sizes)):
            self._contents = torch.zeros(total, dtype=torch.uint8, device=self._device)
        pieces = iter(self._contents[:total].split(sizes * number))
        return [
            {
                name: next(pieces)[: own.nbytes].view(getattr(torch, own.dtype)).view(own.shape)
                for name, own in kind.contents.items()
            }
            for _ in range(number)
        ]

    def _item(self, kind: Kind, places: Mapping[str, torch.Tensor]) -> Item:
        return {
            name: places[name] if isinstance(own, Content) else uploaded(own, self._device)
            for name, own in kind.tensors
        }

    def _rows_of(self, outputs: Sequence[torch.Tensor], kind: Kind) -> torch.Tensor:
        """Return memory for these rows, the same as earlier if it is enough."""
        shape = len(outputs), kind.num_rows, outputs[0].shape[1]
        if any(output.shape != shape[1:] for output in outputs):
            raise RuntimeError(f"it has made {tuple(outputs[0].shape)} of {kind.num_rows} rows")
        total = int(np.prod(shape))
        if len(self._rows) < total or self._rows.dtype != outputs[0].dtype:
            self._rows = torch.empty(total, dtype=outputs[0].dtype, device=self._device)
        return self._rows[:total].view(shape)

    def forget(self) -> None:
        """Drop all graphs: what they took from the host may depend on weights that are others
        now."""
        self._graphs.clear()


def _replay(graph: Graph, kind: Kind, items: Sequence[Item]) -> Sequence[torch.Tensor]:
    names = kind.contents
    sources = (item[name] for item in items for name in names)
    for place, source in zip(graph.contents, sources, strict=True):
        place.copy_(source)
    graph.replay()
    return graph.rows.clone().unbind()


def uploaded(tensor: MediaTensor, device: torch.device) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    host = torch.frombuffer(bytearray(tensor.data), dtype=dtype).view(tensor.shape)
    return host.to(device, non_blocking=True)
