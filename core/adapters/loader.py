"""Loads adapters by name, reads them again after they were dropped, pins and removes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from weakref import WeakValueDictionary

from ..background_tasks import BackgroundTasks
from ..config import EngineConfig
from ..errors import InvalidRequest, shown
from ..lora_request import LoadAdapter, check_adapter_name, unknown_adapter
from ..parts.adapters import MAX_LOADS
from ..scheduling.parts.adapters import Adapters
from .finding import Finder
from .host_memory import Adapter, HostMemory, Loaded
from .names import AdapterNames

logger = logging.getLogger("jackfield.adapters")


class AdapterLoader:
    """What names stand for, and whether it is in host memory."""

    def __init__(
        self,
        config: EngineConfig,
        part: Adapters,
        names: AdapterNames,
        host: HostMemory,
        finder: Finder,
        tasks: BackgroundTasks,
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._part = part
        self._names = names
        self._host = host
        self._finder = finder
        self._tasks = tasks
        self._wake = wake
        self._loading = asyncio.Semaphore(MAX_LOADS)
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """(owner, name) → held while it is loaded."""

    async def load(self, job: LoadAdapter) -> Adapter:
        """Load an adapter by name: those of one name one after another, of several together."""
        name = check_adapter_name(job.name, self._config.served_names)
        if not job.path:
            raise InvalidRequest("lora_path: must not be empty", param="lora_path")
        lock = self._locks.setdefault((job.owner, name), asyncio.Lock())
        async with lock, self._loading:
            present = self._names.of_owner(job.owner, name)
            if present is not None and not job.load_inplace:
                raise InvalidRequest(
                    f"lora_name: an adapter {name!r} is loaded already; to read it again, set "
                    "load_inplace",
                    param="lora_name",
                )
            if present is None:
                self._names.check_new(job)
            form = await self._finder.format_at(job.path)
            self._host.begin()  # Without waiting for room.
            loaded = await self._host.read(job.path, form)
            present = self._names.of_owner(job.owner, name)
            try:
                if present is None:  # Others may have been loaded meanwhile.
                    self._names.check_new(job)
                if job.pinned and not (present is not None and present.pinned):
                    self._check_pin(name, loaded)
            except InvalidRequest:
                self._host.drop(loaded)
                raise
            parent = job.parent or self._config.served_names[0]
            if present is None:
                present = Adapter(name, job.path, form, parent, job.owner)
                self._names.add(present)
            elif job.parent is not None:
                present.parent = parent
            present.path, present.format, present.resolved = job.path, form, False
            present.int_id = present.int_id if job.int_id is None else job.int_id
            self._take(present, loaded)
            if job.pinned and not present.pinned:
                assert present.loaded is not None
                self._keep(present, present.loaded)
            self._host.trim()
            return present

    async def read(self, adapter: Adapter) -> None:
        """Read an adapter again that is not in host memory. Concurrent calls share one read."""
        if adapter.reading is None:
            adapter.reading = self._tasks.start(self._read_again(adapter))
        await asyncio.shield(adapter.reading)

    async def _read_again(self, adapter: Adapter) -> Loaded:
        try:
            await self._host.room()
            elsewhere = False
            if adapter.owner:
                elsewhere = await asyncio.to_thread(_is_elsewhere, adapter.path)
            if elsewhere:
                raise InvalidRequest(
                    f"adapter {shown(adapter.name)}: its path is another than when it was loaded",
                    param="model",
                )
            loaded = await self._host.read(adapter.path, adapter.format)
            if adapter.removed or adapter.loaded is not None:
                self._host.drop(loaded)
            else:
                self._take(adapter, loaded)
            return loaded
        finally:
            adapter.reading = None

    def _take(self, adapter: Adapter, loaded: Loaded) -> None:
        """Let a name stand for what was read, if that is not what it stands for already."""
        before = adapter.loaded
        if before is not None and before.info.digest == loaded.info.digest:
            self._host.drop(loaded)
            return
        if adapter.info is not None and adapter.info.digest != loaded.info.digest:
            logger.info("adapter %r has new content", adapter.name)
        adapter.loaded, adapter.info, loaded.adapter = loaded, loaded.info, adapter
        if before is not None:
            self._host.retire(before)
        if adapter.pinned:
            self._part.unpin(before.number if before is not None else 0)
            if self._part.can_pin(loaded.number, loaded.units):
                self._part.pin(loaded.number, loaded.units)
                self._wake()
            else:
                adapter.pinned = False
                logger.warning("adapter %r is not pinned any more: no room", adapter.name)

    def remove(self, adapter: Adapter) -> None:
        """Forget a name; requests that have it go on."""
        self._names.remove(adapter)
        if adapter.loaded is not None:
            loaded, adapter.loaded = adapter.loaded, None
            self._host.retire(loaded)

    async def pin(self, adapter: Adapter, pinned: bool) -> None:
        if not pinned:
            adapter.pinned = False
            if adapter.loaded is not None:
                self._part.unpin(adapter.loaded.number)
            return
        while (loaded := adapter.loaded) is None:
            if adapter.removed:
                raise unknown_adapter(adapter.name, self._config.served_names)
            await self.read(adapter)
        if not adapter.pinned:
            self._check_pin(adapter.name, loaded)
            self._keep(adapter, loaded)

    def _check_pin(self, name: str, loaded: Loaded) -> None:
        """Raise InvalidRequest if an adapter cannot be pinned besides those that are."""
        if sum(adapter.pinned for adapter in self._names) + 1 >= self._host.most:
            raise InvalidRequest(
                f"adapter {name!r} cannot be pinned: others need room in host memory; raise "
                "max_cpu_loras",
                param="lora_name",
            )
        if not self._part.can_pin(loaded.number, loaded.units):
            raise InvalidRequest(
                f"adapter {name!r} cannot be pinned: one of rank {self._config.max_lora_rank} must "
                "have room beside those that are; raise max_loras",
                param="lora_name",
            )

    def _keep(self, adapter: Adapter, loaded: Loaded) -> None:
        adapter.pinned = True
        self._part.pin(loaded.number, loaded.units)
        self._wake()


def _is_elsewhere(path: str) -> bool:
    """Return whether links lead from a path, which had none when it was checked, elsewhere."""
    return str(Path(path).resolve()) != path
