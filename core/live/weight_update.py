"""A weight update from the caller's side: tensors into buckets, then commit or roll back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator
from os import PathLike, fspath
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import NotFound
from .engine_jobs import (
    BeginUpdate,
    CommitUpdate,
    LiveJob,
    PutTensors,
    ReadFiles,
    ReceiveTensors,
    RollBack,
)
from .worker_jobs import TensorPart

if TYPE_CHECKING:
    import torch

    NamedTensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]
    Weights: TypeAlias = (
        str | PathLike[str] | NamedTensors | AsyncIterable[tuple[str, torch.Tensor]]
    )

BUCKET_BYTES = 64 << 20
"""Bytes sent at a time; a longer tensor is sent in parts."""
Ask: TypeAlias = Callable[[LiveJob], Awaitable[dict[str, Any]]]


class WeightUpdate:
    """A transaction: all tensors of a checkpoint, each once, or the old weights serve on.

    Tensors have the names and shapes of the model's checkpoint. Made by
    `AsyncEngine.begin_weight_update`. As a context manager it rolls back what was not committed.
    """

    def __init__(self, ask: Ask, name: str, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._ask = ask
        self.name = name
        """Names it in jobs and routes."""
        self._bucket_bytes = bucket_bytes
        self.ended = False
        """Whether it was committed, rolled back, or given up after an error."""

    @classmethod
    async def begin(cls, ask: Ask, job: BeginUpdate) -> WeightUpdate:
        """Begin one. Raises Conflict while another one is in progress."""
        return cls(ask, (await ask(job))["update"])

    async def put(self, tensors: NamedTensors | AsyncIterable[tuple[str, torch.Tensor]]) -> None:
        """Send tensors, copied to host memory, a bucket at a time. Raises InvalidRequest, after
        which the update is given up."""
        bucket = _Bucket(self._bucket_bytes)
        if isinstance(tensors, AsyncIterable):
            async for name, tensor in tensors:
                for parts, data in bucket.add(name, tensor):
                    await self._do(PutTensors(update=self.name, parts=parts, data=data))
        else:
            for name, tensor in tensors:
                for parts, data in bucket.add(name, tensor):
                    await self._do(PutTensors(update=self.name, parts=parts, data=data))
        for parts, data in bucket.rest():
            await self._do(PutTensors(update=self.name, parts=parts, data=data))

    async def read(self, path: str | PathLike[str], load_format: str = "") -> None:
        """Read all of it from a checkpoint's folder on the engine's machine."""
        await self._do(ReadFiles(update=self.name, path=fspath(path), load_format=load_format))

    async def receive(self, parts: Iterable[TensorPart], group: str = "weights") -> None:
        """Receive tensors that number 0 of a group broadcasts in this order."""
        await self._do(ReceiveTensors(update=self.name, parts=tuple(parts), group=group))

    async def commit(
        self, version: str | None = None, *, recompute: bool | None = None
    ) -> dict[str, Any]:
        """Serve with the new weights from the next step on; return what `CommitUpdate` says.

        Raises InvalidRequest if they are not whole, or do not fit the model.
        """
        return await self._do(
            CommitUpdate(update=self.name, version=version, recompute=recompute), ends=True
        )

    async def roll_back(self) -> None:
        """Give it up. Harmless once it has ended."""
        if not self.ended:
            with contextlib.suppress(NotFound):
                await self._do(RollBack(update=self.name), ends=True)

    async def _do(self, job: LiveJob, *, ends: bool = False) -> dict[str, Any]:
        try:
            answer = await self._ask(job)
        except Exception:
            self.ended = True
            raise
        self.ended |= ends
        return answer

    async def __aenter__(self) -> WeightUpdate:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.roll_back()


class _Bucket:
    """Joins tensors until there is enough to send."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: list[TensorPart] = []
        self._data = bytearray()

    def add(
        self, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[tuple[TensorPart, ...], bytes]]:
        """Add a tensor, and yield what is full."""
        import torch

        whole = tensor.detach().to("cpu").contiguous()
        dtype, shape = str(whole.dtype).removeprefix("torch."), tuple(whole.shape)
        array: Any = whole.reshape(-1).view(torch.uint8).numpy()
        data = memoryview(array) if len(array) else memoryview(b"")
        start = 0
        while True:
            size = min(len(data) - start, self._most - len(self._data))
            self._parts.append(TensorPart(name, dtype, shape, start, size))
            self._data += data[start : start + size]
            start += size
            if len(self._data) >= self._most:
                yield from self.rest()
            if start >= len(data):
                return

    def rest(self) -> Iterator[tuple[tuple[TensorPart, ...], bytes]]:
        """Yield what is left."""
        if self._parts:
            parts, data = tuple(self._parts), bytes(self._data)
            self._parts, self._data = [], bytearray()
            yield parts, data
