"""Adapters in host memory, read on threads of their own."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...adapters.file import AdapterFile
from ...config import EngineConfig
from ...errors import ConfigError
from ...parts.adapters import MAX_LOADS, AdapterInfo
from ...protocols.adapters import AdapterFormat
from ...registry import Plugins
from ...step import ReadAdapter
from .host_change import HostChange
from .pool import AdapterPool, RankRows
from .sites import PARAM, Sites

KIND = "adapter_format"


@dataclass
class HostAdapter:
    """An adapter in host memory, as this rank needs it."""

    info: AdapterInfo
    rank_rows: RankRows | None
    """Of a plain adapter."""
    special: dict[str, HostChange] = field(default_factory=dict)
    """Of a special one: key of a site → what changes there."""


class HostAdapters:
    """Adapters by number. `read` may be called on any thread, and so may `find`."""

    def __init__(
        self, sites: Sites, pool: AdapterPool, config: EngineConfig, plugins: Plugins, *,
        pinned: bool,
    ) -> None:  # fmt: skip
        self._sites, self._pool, self._config, self._plugins = sites, pool, config, plugins
        self._pinned = pinned
        # One of torch's each: more would wait busily between small copies.
        self._threads = ThreadPoolExecutor(
            min(MAX_LOADS, os.cpu_count() or 1),
            thread_name_prefix="jackfield-adapters",
            initializer=torch.set_num_threads,
            initargs=(1,),
        )
        self._lock = threading.Lock()
        self._adapters: dict[int, Future[HostAdapter]] = {}

    def read(self, job: ReadAdapter) -> Future[AdapterInfo]:
        """Begin to read an adapter. The future fails with ConfigError for one that cannot be
        served."""
        future = self._threads.submit(self._read, job)
        with self._lock:
            self._adapters[job.number] = future
        info: Future[AdapterInfo] = Future()

        def pass_on(done: Future[HostAdapter]) -> None:
            if done.cancelled():  # The worker stops.
                info.cancel()
            elif (error := done.exception()) is not None:
                self.drop(job.number)
                info.set_exception(error)
            else:
                info.set_result(done.result().info)

        future.add_done_callback(pass_on)
        return info

    def find(self, number: int) -> HostAdapter:
        """Return an adapter, once it is read. Raises KeyError if it is not there, and what reading
        it raised."""
        with self._lock:
            future = self._adapters[number]
        return future.result()

    def drop(self, number: int) -> None:
        """Forget an adapter. Harmless if it is not there."""
        with self._lock:
            self._adapters.pop(number, None)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _read(self, job: ReadAdapter) -> HostAdapter:
        registry = self._plugins[KIND]
        adapter_format: type[AdapterFormat] = registry.load(job.format)
        with registry.calling(job.format, "read"):
            file = adapter_format.read(Path(job.path))
        return self.place(file)

    def place(self, file: AdapterFile) -> HostAdapter:
        """Return an adapter in the form that this rank needs. Raises ConfigError."""
        self._check(file)
        with torch.inference_mode():
            changes = self._sites.changes(file)
            plain = all(change.plain and self._has_pool(key) for key, change in changes.items())
            rows = self._pool.pack(changes, pinned=self._pinned) if plain else None
        nbytes = 0 if rows is None else rows.nbytes
        if not plain:
            nbytes = sum(t.nbytes for each in changes.values() for t in each.tensors())
        info = AdapterInfo(
            digest=file.digest,
            rank=file.rank if plain else 0,
            nbytes=nbytes,
            special=not plain,
            invocation_tokens=file.invocation_tokens,
            base_model=file.base_model,
            notes=file.notes,
        )
        return HostAdapter(info, rows, {} if plain else changes)

    def _has_pool(self, key: str) -> bool:
        return any(layout.site.key == key for layout in self._pool.layouts)

    def _check(self, file: AdapterFile) -> None:
        """Raise ConfigError for what the configuration excludes."""
        most = self._config.max_lora_rank
        if file.rank > most:
            raise ConfigError(
                f"r: the adapter has a rank of {file.rank}, and max_lora_rank is {most}", param="r"
            )
        targets = self._config.lora_target_modules
        names = [each.name for each in file.low_rank]
        names += [each.name for each in file.experts]
        names += [each.name for each in file.token_rows]
        if not (names or file.replaced):
            raise ConfigError(f"{PARAM}: the adapter changes nothing", param=PARAM)
        others = [name for name in names if targets and name.rpartition(".")[2] not in targets]
        if others:
            raise ConfigError(
                f"lora_target_modules: the adapter changes {others[0]}, which is not among them",
                param="lora_target_modules",
            )
