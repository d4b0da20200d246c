"""The adapters of an engine by name: loading, reloading, unloading."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec

from ..config import EngineConfig
from ..errors import (
    ConfigError,
    InvalidRequest,
    JackfieldError,
    NotFound,
    shown,
)
from ..lora_request import (
    AdapterCard,
    AdapterJob,
    AdapterRef,
    FindAdapter,
    ListAdapters,
    LoadAdapter,
    PinAdapter,
    UnloadAdapter,
    check_adapter_name,
    unknown_adapter,
)
from ..metrics.adapter_metrics import AdapterCounts
from ..parts.adapters import MAX_LOADS, NAME, AdapterUse
from ..registry import Plugins
from ..request import RequestSpec
from ..scheduling.parts.adapters import Adapters
from ..step import WorkerJob
from .activation import first_position
from .finding import Finder
from .host_memory import Adapter, HostMemory, Loaded

logger = logging.getLogger("jackfield.adapters")
K = TypeVar("K")
T = TypeVar("T")
MAX_NAMES = 10_000
"""Adapters that are known by name; a list of them takes 50 ms."""


class AdapterRegistry:
    """Names → adapters, of one engine. Everything here runs on the event loop.

    An adapter that was dropped from host memory is read again when a request asks for it.
    """

    def __init__(
        self,
        config: EngineConfig,
        part: Adapters,
        plugins: Plugins,
        *,
        ask: Callable[[WorkerJob], asyncio.Future[Any]],
        wake: Callable[[], None],
    ) -> None:
        """part: the scheduler's half. ask: the executor. wake: called when there may be something
        to plan."""
        self._config = config
        self._part = part
        self._finder = Finder(config, plugins)
        self._host = HostMemory(config, part, ask)
        self._wake = wake
        self._adapters: OrderedDict[tuple[str, str], Adapter] = OrderedDict()
        """Owner and name → adapter."""
        self._resolving: dict[str, asyncio.Task[Adapter]] = {}
        self._requested: dict[LoadAdapter, asyncio.Task[Adapter]] = {}
        """Loads of adapters that requests bring."""
        self._loading = asyncio.Semaphore(MAX_LOADS)
        self._names: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """(owner, name) → held while it is loaded."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self.num_waiting = 0
        """Requests that wait until their adapter is in host memory."""

    # ------------------------------------------------------------ requests

    async def applied(self, spec: RequestSpec) -> RequestSpec:
        """Return a request with its adapter, which is in host memory until the caller's next
        `await`. Raises ModelNotFound, and InvalidRequest if the adapter cannot be served."""
        ref = spec.adapter
        assert ref is not None
        self.num_waiting += 1
        try:
            loaded = await self._use(ref)
        finally:
            self.num_waiting -= 1
        info, first = loaded.info, 0
        if info.invocation_tokens:
            if spec.source is not None:
                raise InvalidRequest(
                    f"adapter {ref.name!r} is activated by tokens of the prompt (aLoRA), which "
                    "encoder-decoder models do not do",
                    param="model",
                )
            position = first_position(spec.prompt_token_ids, info.invocation_tokens)
            if position is None:
                return spec
            first = position
        use = AdapterUse(loaded.number, loaded.units, first)
        # A KV connector may be shared with engines that compute adapters in another type.
        dtype = self._config.lora_dtype
        key = info.digest if dtype == "auto" else f"{info.digest} {dtype}"
        extra, late = spec.cache_extra, spec.late_extra
        if first:
            late = (*late, (first, key))
        else:
            extra = (*extra, key)
        return msgspec.structs.replace(
            spec, parts={**spec.parts, NAME: use}, cache_extra=extra, late_extra=late
        )

    async def _use(self, ref: AdapterRef) -> Loaded:
        """Return the adapter that a request asks for, once it is in host memory."""
        adapter = await self._find(ref)
        while True:
            if adapter.removed:
                raise self._unknown(ref.name)
            loaded = adapter.loaded
            if loaded is None:
                adapter.num_waiting += 1
                try:
                    await self._read_shared(adapter)
                finally:
                    adapter.num_waiting -= 1
                # Not to be dropped for another read before the requests have it that waited.
                if adapter.loaded is not None:
                    return adapter.loaded
            elif (waiter := self._host.waiter_before(loaded)) is not None:
                await waiter.ended.wait()
            else:
                self._host.use(loaded)
                return loaded

    async def _find(self, ref: AdapterRef) -> Adapter:
        """Return what a request's name stands for. Raises ModelNotFound."""
        adapter = self._get(ref.name, ref.tenant, ref.shared)
        if adapter is not None and (not ref.path or Path(ref.path) == Path(adapter.path)):
            if ref.load_inplace:
                return await self._load_for(ref)
            if ref.int_id is not None:
                adapter.int_id = ref.int_id
            return adapter
        if ref.path:
            if adapter is not None and not ref.load_inplace:
                raise InvalidRequest(
                    f"lora_request: {ref.name!r} is loaded from {adapter.path!r}; to take "
                    f"{ref.path!r} in its place, set load_inplace",
                    param="lora_request",
                )
            return await self._load_for(ref)
        if not ref.shared:
            raise self._unknown(ref.name)
        return await self._resolve(ref.name)

    async def _load_for(self, ref: AdapterRef) -> Adapter:
        """Load the adapter that a request brings; those that come meanwhile with the same share the
        load."""
        adapter = self._get(ref.name, ref.tenant)
        job = LoadAdapter(
            name=ref.name,
            path=ref.path or ("" if adapter is None else adapter.path),
            load_inplace=True,
            parent=ref.parent,
            owner=ref.tenant or "",
            int_id=ref.int_id,
        )
        return await self._shared(self._requested, job, lambda: self._load(job))

    async def _resolve(self, name: str) -> Adapter:
        """Ask resolvers for an adapter that is not loaded. Raises ModelNotFound."""
        try:
            check_adapter_name(name, self._config.served_names)
        except InvalidRequest:
            raise self._unknown(name) from None
        return await self._shared(self._resolving, name, lambda: self._resolve_alone(name))

    async def _resolve_alone(self, name: str) -> Adapter:
        path = await self._finder.resolve(name)
        if path is None:
            raise self._unknown(name)
        try:
            form = await self._finder.format_at(path)
        except NotFound as error:
            logger.warning("no adapter %s: %s", shown(name), error.message)
            raise self._unknown(name) from None
        if (adapter := self._adapters.get(("", name))) is None:
            self._check_room()
            adapter = Adapter(name, path, form, self._config.served_names[0], resolved=True)
            self._add(adapter)
        return adapter

    # ------------------------------------------------------------ jobs

    async def do(self, job: AdapterJob) -> list[AdapterCard]:
        """Return what the job's class says."""
        match job:
            case LoadAdapter():
                # Goes on without its caller: what is half read has no name to be dropped by.
                return [self._card(await asyncio.shield(self._task(self._load(job))))]
            case UnloadAdapter():
                return self._unload(job)
            case PinAdapter():
                adapter = self._named(job.name, job.int_id, None)
                if adapter is None:
                    return []
                await self._pin(adapter, job.pinned)
                return [self._card(adapter)]
            case FindAdapter():
                return [self._card(await self._find(job.ref))]
            case ListAdapters():
                pass
        return [self._card(adapter) for adapter in sorted(
            self._adapters.values(), key=lambda each: (each.name, each.owner)
        )]  # fmt: skip

    async def _load(self, job: LoadAdapter) -> Adapter:
        """Load an adapter by name: those of one name one after another, of several together."""
        name = check_adapter_name(job.name, self._config.served_names)
        if not job.path:
            raise InvalidRequest("lora_path: must not be empty", param="lora_path")
        lock = self._names.setdefault((job.owner, name), asyncio.Lock())
        async with lock, self._loading:
            present = self._adapters.get((job.owner, name))
            if present is not None and not job.load_inplace:
                raise InvalidRequest(
                    f"lora_name: an adapter {name!r} is loaded already; to read it again, set "
                    "load_inplace",
                    param="lora_name",
                )
            if present is None:
                self._check_new(job)
            form = await self._finder.format_at(job.path)
            self._host.begin()  # Without waiting for room.
            loaded = await self._host.read(job.path, form)
            present = self._adapters.get((job.owner, name))
            try:
                if present is None:  # Others may have been loaded meanwhile.
                    self._check_new(job)
                if job.pinned and not (present is not None and present.pinned):
                    self._check_pin(name, loaded)
            except InvalidRequest:
                self._host.drop(loaded)
                raise
            parent = job.parent or self._config.served_names[0]
            if present is None:
                present = Adapter(name, job.path, form, parent, job.owner)
                self._add(present)
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

    def _unload(self, job: UnloadAdapter) -> list[AdapterCard]:
        adapter = self._named(job.name, job.int_id, job.tenant)
        if adapter is None or (job.tenant is not None and adapter.owner != job.tenant):
            return []
        card = self._card(adapter)
        self._remove(adapter)
        return [card]

    def _remove(self, adapter: Adapter) -> None:
        """Forget a name; requests that have it go on."""
        adapter.removed = True
        del self._adapters[adapter.owner, adapter.name]
        if adapter.loaded is not None:
            loaded, adapter.loaded = adapter.loaded, None
            self._host.retire(loaded)

    async def _pin(self, adapter: Adapter, pinned: bool) -> None:
        if not pinned:
            adapter.pinned = False
            if adapter.loaded is not None:
                self._part.unpin(adapter.loaded.number)
            return
        while (loaded := adapter.loaded) is None:
            if adapter.removed:
                raise self._unknown(adapter.name)
            await self._read_shared(adapter)
        if not adapter.pinned:
            self._check_pin(adapter.name, loaded)
            self._keep(adapter, loaded)

    def _check_pin(self, name: str, loaded: Loaded) -> None:
        """Raise InvalidRequest if an adapter cannot be pinned besides those that are."""
        if sum(adapter.pinned for adapter in self._adapters.values()) + 1 >= self._host.most:
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

    # ------------------------------------------------------------ names

    def _get(self, name: str, tenant: str | None, shared: bool = True) -> Adapter | None:
        """Return what a name stands for, for a tenant: its own adapter before everyone's."""
        if tenant is None:
            adapter = self._adapters.get(("", name))
            if adapter is not None:
                return adapter
            return next((each for each in self._adapters.values() if each.name == name), None)
        own = self._adapters.get((tenant, name))
        return own or (self._adapters.get(("", name)) if shared else None)

    def _named(self, name: str, int_id: int | None, tenant: str | None) -> Adapter | None:
        if int_id is None:
            return self._get(name, tenant)
        adapters = self._adapters.values()
        return next((a for a in adapters if a.int_id == int_id and tenant in (None, a.owner)), None)

    def _add(self, adapter: Adapter) -> None:
        self._adapters[adapter.owner, adapter.name] = adapter

    def _check_new(self, job: LoadAdapter) -> None:
        """Raise InvalidRequest if there is no room for one more name."""
        self._check_owned(job)
        self._check_room()

    def _check_owned(self, job: LoadAdapter) -> None:
        """Raise InvalidRequest if an owner may have no further adapter."""
        owned = sum(adapter.owner == job.owner for adapter in self._adapters.values())
        if job.most is not None and owned >= job.most:
            raise InvalidRequest(
                f"lora_name: {owned} adapters of yours are loaded, and {job.most} may be; unload "
                "one first",
                param="lora_name",
            )

    def _check_room(self) -> None:
        """Forget an adapter that a resolver would find again if there are too many. Raises
        InvalidRequest if there is none such."""
        if len(self._adapters) < MAX_NAMES:
            return
        for adapter in self._adapters.values():
            if adapter.resolved and adapter.loaded is None and adapter.reading is None:
                self._remove(adapter)
                return
        raise InvalidRequest(
            f"lora_name: {MAX_NAMES} adapters are loaded; unload one first", param="lora_name"
        )

    def _unknown(self, name: str) -> JackfieldError:
        return unknown_adapter(name, self._config.served_names)

    def _card(self, adapter: Adapter) -> AdapterCard:
        loaded, info, part = adapter.loaded, adapter.info, self._part
        number = 0 if loaded is None else loaded.number
        running = part.num_running(number)
        return AdapterCard(
            name=adapter.name,
            path=adapter.path,
            format=adapter.format,
            parent=adapter.parent,
            owner=adapter.owner,
            int_id=adapter.int_id,
            pinned=adapter.pinned,
            digest="" if info is None else info.digest,
            rank=0 if info is None else info.rank,
            nbytes=0 if loaded is None else loaded.info.nbytes,
            resident=part.is_resident(number),
            running=running,
            waiting=part.num_live(number) - running,
            notes=() if info is None else info.notes,
        )

    def counts(self) -> AdapterCounts:
        """Return how the adapters are doing, for metrics."""
        part = self._part
        everyones = [
            (loaded.number, loaded.adapter.name)
            for loaded in self._host
            if loaded.adapter is not None and not loaded.adapter.owner
        ]
        live = [(n, name) for n, name in everyones if part.num_live(n)]
        return AdapterCounts(
            registered=len(self._adapters),
            loaded=len(self._host),
            resident=part.num_residents,
            host_bytes=sum(loaded.info.nbytes for loaded in self._host),
            requests_waiting=self.num_waiting + part.num_parked,
            reads=self._host.num_reads,
            read_seconds=self._host.read_seconds,
            **part.counts,
            running_names=tuple(name for n, name in live if part.num_running(n)),
            waiting_names=tuple(name for n, name in live if part.num_live(n) > part.num_running(n)),
        )

    # ------------------------------------------------------------ host memory

    async def _read_shared(self, adapter: Adapter) -> None:
        """Read an adapter again that is not in host memory. Concurrent calls share one read."""
        if adapter.reading is None:
            adapter.reading = self._task(self._read_again(adapter))
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

    # ------------------------------------------------------------ start and end

    async def start(self) -> None:
        """Load the adapters of the configuration. Raises ConfigError for one that cannot be
        served."""
        for module in self._config.lora_modules:
            job = LoadAdapter(
                name=module.name,
                path=module.path,
                parent=module.base_model_name,
                pinned=module.pinned,
            )
            try:
                await self._load(job)
            except InvalidRequest as error:
                raise ConfigError(
                    f"lora_modules: {module.name!r}: {error.message}", param="lora_modules"
                ) from error

    async def close(self) -> None:
        """End what is being read or resolved."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _shared(
        self, tasks: dict[K, asyncio.Task[T]], key: K, work: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Return what `work` returns; calls with the same key meanwhile share it."""
        if (task := tasks.get(key)) is None:
            task = tasks[key] = self._task(work())
            task.add_done_callback(lambda _: tasks.pop(key, None))
        return await asyncio.shield(task)

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run work that goes on if who waits for it does not."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Those who wait for it have it; there may be none left.


def _is_elsewhere(path: str) -> bool:
    """Return whether links lead from a path, which had none when it was checked, elsewhere."""
    return str(Path(path).resolve()) != path
