"""Which adapters are in host memory, and which read waits for room."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ..config import EngineConfig
from ..errors import EngineStopped, InvalidRequest, JackfieldError, RequestFailed, shown
from ..parts.adapters import AdapterInfo, num_units
from ..scheduling.parts.adapters import Adapters
from ..step import DropAdapter, ReadAdapter, WorkerJob

logger = logging.getLogger("jackfield.adapters")


@dataclass(eq=False)
class Loaded:
    """One load of one content, in the host memory of every rank."""

    number: int
    info: AdapterInfo
    adapter: Adapter | None = None
    """None: it was unloaded or replaced, and is dropped once no request uses it."""

    @property
    def units(self) -> int:
        return num_units(self.info.rank)


@dataclass(eq=False)
class Adapter:
    """What a name stands for."""

    name: str
    path: str
    format: str
    parent: str
    owner: str = ""
    int_id: int | None = None
    pinned: bool = False
    resolved: bool = False
    """Whether a resolver has found it, and would find it again."""
    removed: bool = False
    info: AdapterInfo | None = None
    """From its last load; None before the first."""
    loaded: Loaded | None = None
    """None: not in host memory."""
    reading: asyncio.Task[Loaded] | None = None
    num_waiting: int = 0
    """Requests that wait until it is read."""


@dataclass(eq=False)
class Waiter:
    """A read that waits for room in host memory."""

    since: int
    """Plans that there were before."""
    room: asyncio.Future[None]
    victim: Loaded | None = None
    """What gets no new requests, so that this read gets its room; None: it has not waited too
    long."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it waits no longer."""


class HostMemory:
    """Adapters by number, in the host memory of every rank.

    At most `max_cpu_loras` are there, and some more while they are loaded by name. One that no
    request uses is dropped for another, the least recently used first. If requests use all of them,
    a read waits; after `lora_max_wait_steps` steps, no new request gets the one that will be free
    first.
    """

    def __init__(
        self, config: EngineConfig, part: Adapters, ask: Callable[[WorkerJob], asyncio.Future[Any]]
    ) -> None:
        self._config = config
        self._part = part
        self._ask = ask
        self.most = config.max_cpu_loras or config.max_loras
        self._loaded: OrderedDict[int, Loaded] = OrderedDict()
        """Number → adapter, the least recently used one first."""
        self._numbers = count(1)
        self._num_reading = 0
        """Reads that have room, and are not done."""
        self._waiters: deque[Waiter] = deque()
        self._settles: set[int] = set()
        self.num_reads = 0
        self.read_seconds = 0.0
        part.watch_idle(self._idle)

    def __len__(self) -> int:
        return len(self._loaded)

    def __iter__(self) -> Iterator[Loaded]:
        return iter(self._loaded.values())

    def use(self, loaded: Loaded) -> None:
        """Note that a request gets an adapter."""
        self._loaded.move_to_end(loaded.number)

    def begin(self) -> None:
        """Count one more adapter as being read."""
        self._num_reading += 1

    async def read(self, path: str, form: str) -> Loaded:
        """Read an adapter on all ranks; it counts as being read already. What is returned stands
        for no name yet."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        began = loop.time()
        try:
            info = await self._answer(ReadAdapter(number, path, form))
        finally:
            self._num_reading -= 1
            loop.call_soon(self._free_room)
        self.num_reads += 1
        self.read_seconds += loop.time() - began
        loaded = self._loaded[number] = Loaded(number, info)
        if info.rank > self._config.max_lora_rank:
            self.drop(loaded)
            raise InvalidRequest(
                f"the adapter's rank is {info.rank}, more than max_lora_rank "
                f"({self._config.max_lora_rank})",
                param="lora_path",
            )
        return loaded

    async def _answer(self, job: ReadAdapter) -> AdapterInfo:
        try:
            info: AdapterInfo = await self._ask(job)
        except (EngineStopped, InvalidRequest):
            raise
        except JackfieldError as error:  # A ConfigError names a field of the adapter's file.
            raise InvalidRequest(error.message, param="lora_path") from error
        except NotImplementedError:
            raise InvalidRequest(
                f"enable_lora: executor {self._config.executor!r} reads no adapters",
                param="lora_path",
            ) from None
        except Exception as error:
            logger.exception("the adapter at %s could not be read", job.path)
            raise RequestFailed(
                f"the adapter could not be read: {type(error).__name__}: {error}"
            ) from error
        return info

    async def room(self) -> None:
        """Wait until one more adapter may be read, which then counts as being read."""
        if not self._waiters and self._make_room():
            self._num_reading += 1
            return
        waiter = Waiter(self._part.num_plans, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter.room
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            else:
                self._num_reading -= 1
                self._free_room()
            raise
        finally:
            waiter.ended.set()

    def _make_room(self) -> bool:
        """Return whether there is room for one more, dropping one that no request uses if need
        be."""
        while len(self._loaded) + self._num_reading >= self.most:
            if (loaded := self._least_used()) is None:
                return False
            self.drop(loaded)
        return True

    def _least_used(self) -> Loaded | None:
        """Return what may be dropped: no request uses it, and it is not pinned."""
        return next(
            (
                loaded
                for loaded in self._loaded.values()
                if not self._num_requests(loaded) and not _is_pinned(loaded)
            ),
            None,
        )

    def _num_requests(self, loaded: Loaded) -> int:
        """Return the requests that have an adapter, or have waited for it and get it now."""
        waiting = 0 if loaded.adapter is None else loaded.adapter.num_waiting
        return self._part.num_live(loaded.number) + waiting

    def _free_room(self) -> None:
        """Let reads begin that wait for room, in order."""
        while self._waiters and self._make_room():
            waiter = self._waiters.popleft()
            self._num_reading += 1
            if not waiter.room.done():  # Else it is being cancelled, and gives the room back.
                waiter.room.set_result(None)

    def trim(self) -> None:
        """Drop what is too much after a load."""
        while len(self._loaded) + self._num_reading > self.most:
            if (loaded := self._least_used()) is None:
                return
            self.drop(loaded)

    def waiter_before(self, loaded: Loaded) -> Waiter | None:
        """Return the read that has waited too long for an adapter's room, so that no new request
        gets the adapter; None: a request may use it."""
        if not self._waiters:
            return None
        first = self._waiters[0]
        if first.victim is not None and _is_pinned(first.victim):
            first.victim = None
        if first.victim is None and self._part.num_plans - first.since >= self._part.max_wait:
            first.victim = min(
                (each for each in self._loaded.values() if not _is_pinned(each)),
                key=self._num_requests,
                default=None,
            )
        return first if first.victim is loaded else None

    def retire(self, loaded: Loaded) -> None:
        """Drop what no name stands for any more, once no request uses it."""
        loaded.adapter = None
        self._part.unpin(loaded.number)
        if not self._part.num_live(loaded.number):
            self.drop(loaded)

    def drop(self, loaded: Loaded) -> None:
        """Free an adapter's memory, which no request uses."""
        if loaded.adapter is not None:
            loaded.adapter.loaded = None
            loaded.adapter = None
        del self._loaded[loaded.number]
        self._part.forget(loaded.number)
        self._ask(DropAdapter(loaded.number)).add_done_callback(_log_failure)

    def _idle(self, number: int) -> None:
        """Note that the last request of an adapter has ended; not in the middle of it."""
        if number not in self._settles:
            self._settles.add(number)
            asyncio.get_running_loop().call_soon(self._settle, number)

    def _settle(self, number: int) -> None:
        self._settles.discard(number)
        loaded = self._loaded.get(number)
        if loaded is not None and loaded.adapter is None and not self._part.num_live(number):
            self.drop(loaded)
        self._free_room()


def _is_pinned(loaded: Loaded) -> bool:
    return loaded.adapter is not None and loaded.adapter.pinned


def _log_failure(dropped: asyncio.Future[None]) -> None:
    if not dropped.cancelled() and (error := dropped.exception()) is not None:
        logger.warning("an adapter could not be dropped: %s", shown(str(error)))
