"""One rank's work on its launch thread; rank 0's is in the engine's process, others have their
own.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from socket import socket
from typing import Any

import torch

from ...core.config import EngineConfig
from ...core.engine.resolve_config import resolve_runner
from ...core.loading.model_config import ModelConfig, resolve_model_config
from ...core.parallel.join import join, leave, rank_device
from ...core.parallel.ranks import ONE_RANK, Ranks
from ...core.protocols.executors import ExecutorInfo
from ...core.registry import Plugins, load_plugins
from ...core.step import Ping, WorkerJob
from ...core.worker.parts.kv_transfer import KVTransfer
from ...core.worker.start.device_init import initialize_device, separate_streams
from ...core.worker.worker import Worker
from .progress import Progress


def start_rank(
    config: EngineConfig,
    plugin_names: Sequence[str],
    rank: int,
    local_rank: int,
    address: tuple[str, int],
    progress: Progress,
    joining: Callable[[], None],
) -> tuple[RankWorker, ExecutorInfo]:
    """Start a rank in its own process. `config`: resolved; `plugin_names`: external plugins to
    load; `local_rank`: the device's number on its host; `joining`: called right before it joins the
    others. Raises what the start of an engine raises.
    """
    separate_streams(config)
    device = rank_device(config, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    plugins = load_plugins(disable=config.disable_plugins, only=plugin_names)
    plugins.configure(config.plugin_options)
    initializing = threading.Thread(target=_initialize, args=(config, plugins, device))
    initializing.start()
    model_config = resolve_model_config(config, plugins)
    config, model_config = resolve_runner(config, config, model_config, plugins)
    initializing.join()
    joining()
    joined = RankWorker.join(config, model_config, plugins, rank, local_rank, address, progress)
    return joined, joined.worker.start()


def _initialize(config: EngineConfig, plugins: Plugins, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Of this thread: another one's would be the first device.
    initialize_device(config, plugins)


class RankWorker:
    """A worker and the group in which it computes."""

    def __init__(self, worker: Worker, ranks: Ranks) -> None:
        self.worker = worker
        self._ranks: Ranks | None = ranks
        """None after it left."""

    @classmethod
    def join(
        cls,
        config: EngineConfig,
        model_config: ModelConfig,
        plugins: Plugins,
        rank: int,
        local_rank: int,
        address: tuple[str, int],
        progress: Progress,
        listener: socket | None = None,
    ) -> RankWorker:
        """Join the other ranks, if any, and create the worker, not yet started."""
        separate_streams(config)
        device = rank_device(config, local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # Of this thread.
        ranks = ONE_RANK
        if config.num_ranks > 1 or config.divides_experts_among_engines:
            ranks = join(
                config,
                plugins,
                rank=rank,
                address=address,
                listener=listener,
                local_rank=local_rank,
            )
        counted = dataclasses.replace(ranks, tensor=progress.counted(ranks.tensor))
        if (world := ranks.pipeline.world) is not None:
            links = dataclasses.replace(ranks.pipeline, world=progress.counted(world))
            counted = dataclasses.replace(counted, pipeline=links)
        if ranks.round is not None:
            ranks.round.waits = progress.await_engines
        return cls(Worker(config, model_config, plugins, counted), ranks)

    def run_job(self, job: WorkerJob) -> Any:
        """Do a job while no step is in flight."""
        return None if isinstance(job, Ping) else self.worker.run_job(job)

    def detach_connector(self, failure: str) -> None:
        """Close the KV connector's worker half, as that of another rank has raised."""
        if (transfers := self.worker.part(KVTransfer)) is not None:
            transfers.detach(failure)

    def stop(self) -> None:
        """Release the device, then leave the group: recorded graphs use it until then."""
        self.worker.stop()
        self.leave()

    def leave(self) -> None:
        """Leave the group, once. From another thread, this ends blocked calls if the library
        can.
        """
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            leave(ranks)
