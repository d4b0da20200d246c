"""The adapters of an engine by name: what requests get, and jobs that change them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ..background_tasks import BackgroundTasks
from ..config import EngineConfig
from ..errors import ConfigError, InvalidRequest, JackfieldError, NotFound, shown
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
    configured_loads,
    unknown_adapter,
)
from ..metrics.adapter_metrics import AdapterCounts
from ..parts.adapters import NAME, AdapterUse
from ..registry import Plugins
from ..request import RequestSpec
from ..scheduling.parts.adapters import Adapters
from ..step import WorkerJob
from .activation import first_position
from .finding import Finder
from .host_memory import Adapter, HostMemory, Loaded
from .loader import AdapterLoader
from .names import AdapterNames
from .reports import adapter_card, adapter_counts

logger = logging.getLogger("jackfield.adapters")


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
        self._names = AdapterNames()
        self._tasks = BackgroundTasks()
        self._loader = AdapterLoader(
            config, part, self._names, self._host, self._finder, self._tasks, wake
        )
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
        use = AdapterUse(loaded.number, loaded.units, first, ref.name)
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
                    await self._loader.read(adapter)
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
        adapter = self._names.get(ref.name, ref.tenant, ref.shared)
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
        adapter = self._names.get(ref.name, ref.tenant)
        job = LoadAdapter(
            name=ref.name,
            path=ref.path or ("" if adapter is None else adapter.path),
            load_inplace=True,
            parent=ref.parent,
            owner=ref.tenant or "",
            int_id=ref.int_id,
        )
        return await self._tasks.share(job, lambda: self._loader.load(job))

    async def _resolve(self, name: str) -> Adapter:
        """Ask resolvers for an adapter that is not loaded. Raises ModelNotFound."""
        try:
            check_adapter_name(name, self._config.served_names)
        except InvalidRequest:
            raise self._unknown(name) from None
        return await self._tasks.share(name, lambda: self._resolve_alone(name))

    async def _resolve_alone(self, name: str) -> Adapter:
        path = await self._finder.resolve(name)
        if path is None:
            raise self._unknown(name)
        try:
            form = await self._finder.format_at(path)
        except NotFound as error:
            logger.warning("no adapter %s: %s", shown(name), error.message)
            raise self._unknown(name) from None
        if (adapter := self._names.of_owner("", name)) is None:
            self._names.make_room()
            adapter = Adapter(name, path, form, self._config.served_names[0], resolved=True)
            self._names.add(adapter)
        return adapter

    # ------------------------------------------------------------ jobs

    async def do(self, job: AdapterJob) -> list[AdapterCard]:
        """Return what the job's class says."""
        match job:
            case LoadAdapter():
                # Goes on without its caller: what is half read has no name to be dropped by.
                return [self._card(await self._tasks.finish(self._loader.load(job)))]
            case UnloadAdapter():
                return self._unload(job)
            case PinAdapter():
                adapter = self._names.named(job.name, job.int_id, None)
                if adapter is None:
                    return []
                await self._loader.pin(adapter, job.pinned)
                return [self._card(adapter)]
            case FindAdapter():
                return [self._card(await self._find(job.ref))]
            case ListAdapters():
                pass
        return [self._card(adapter) for adapter in sorted(
            self._names, key=lambda each: (each.name, each.owner)
        )]  # fmt: skip

    def _unload(self, job: UnloadAdapter) -> list[AdapterCard]:
        adapter = self._names.named(job.name, job.int_id, job.tenant)
        if adapter is None or (job.tenant is not None and adapter.owner != job.tenant):
            return []
        card = self._card(adapter)
        self._loader.remove(adapter)
        return [card]

    def _unknown(self, name: str) -> JackfieldError:
        return unknown_adapter(name, self._config.served_names)

    def _card(self, adapter: Adapter) -> AdapterCard:
        return adapter_card(adapter, self._part)

    def counts(self) -> AdapterCounts:
        """Return how the adapters are doing, for metrics."""
        return adapter_counts(
            self._part, self._host, registered=len(self._names), num_waiting=self.num_waiting
        )

    # ------------------------------------------------------------ start and end

    async def start(self) -> None:
        """Load the adapters of the configuration. Raises ConfigError for one that cannot be
        served."""
        for job in configured_loads(self._config.lora_modules):
            try:
                await self._loader.load(job)
            except InvalidRequest as error:
                raise ConfigError(
                    f"lora_modules: {job.name!r}: {error.message}", param="lora_modules"
                ) from error

    async def close(self) -> None:
        """End what is being read or resolved."""
        await self._tasks.cancel()
