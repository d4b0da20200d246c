"""Weight updates on one rank: staged on a thread beside the steps, applied between them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import nn

from ..config import EngineConfig
from ..errors import InvalidRequest, LoadError
from ..live.worker_jobs import (
    ApplyWeights,
    BeginWeights,
    CheckRelease,
    DropWeights,
    FinishWeights,
    JoinSenders,
    LeaveSenders,
    OpenWeights,
    PutWeights,
    ReadWeights,
    ReceiveWeights,
    RestoreMemory,
    StagingJob,
    WeightCount,
)
from ..loading.model_config import ModelConfig
from ..loading.model_tensors import ModelTensors
from ..loading.second_model import ModelBeside, SecondModel
from ..nn.operations import Operations
from ..parallel.ranks import Ranks
from ..registry import Plugins
from .kv_cache.memory import explain_oom
from .memory_release import MemoryRelease
from .shared_tensors import receive_shared
from .weight_senders import WeightSenders

T = TypeVar("T")


class WeightUpdates:
    """At most one second model, and the groups that weights come from."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        plugins: Plugins,
        ranks: Ranks,
        device: torch.device,
        model: nn.Module,
        operations: Operations,
        serving: ModelTensors,
        memory: MemoryRelease,
        beside: Sequence[ModelBeside] = (),
    ) -> None:
        """model: the one that serves; serving: its tensors, as it was built; memory: its own;
        beside: what serves beside it."""
        self._beside = beside
        self._config, self._model_config, self._plugins = config, model_config, plugins
        self._ranks, self._device, self._operations = ranks, device, operations
        self._model, self._serving, self.memory = model, serving, memory
        self._second: SecondModel | None = None
        stage = ranks.pipeline.size - 1 - ranks.pipeline.stage
        self._rank = stage * ranks.tensor.size + ranks.tensor.rank
        self._senders = WeightSenders(self._rank, device)
        # One: what an update brings is taken in order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jackfield-weights")

    def stage(self, job: StagingJob) -> Future[Any]:
        """Do a job that changes nothing that serves."""
        if not isinstance(job, FinishWeights | CheckRelease | RestoreMemory):
            return self._thread.submit(self._stage, job)
        # Here: what models derive may take all ranks, which steps must not use meanwhile.
        done: Future[Any] = Future()
        try:
            done.set_result(self._at_rest(job))
        except BaseException as error:
            done.set_exception(error)
        return done

    def _at_rest(self, job: FinishWeights | CheckRelease | RestoreMemory) -> Any:
        match job:
            case FinishWeights():
                return self._finish()
            case CheckRelease():
                return self.memory.check(job.owners, keep=job.keep)
            case RestoreMemory():
                with _explained("taking memory again"), torch.inference_mode():
                    return self.memory.restore(job.owners)

    @torch.inference_mode()
    def _stage(self, job: StagingJob) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # Of this thread.
        with _explained("staging new weights"):
            match job:
                case BeginWeights():
                    self._begin()
                case ReadWeights():
                    self._staged().read(job.path, job.load_format)
                case PutWeights():
                    self._staged().put(job.parts, job.data)
                case ReceiveWeights():
                    self._senders.receive(job, self._staged().add)
                case OpenWeights():
                    receive_shared(job.buckets, self._rank, self._device, self._staged().add)
                case JoinSenders():
                    self._senders.join(job)
                case LeaveSenders():
                    self._senders.leave(job.group)
                case DropWeights():
                    self._second = None

    def _begin(self) -> None:
        if self._config.enable_eplb:
            raise InvalidRequest(
                "enable_eplb: experts have moved since the start, so weights cannot be updated"
            )
        self._second = None  # Its memory is free before the next one's is taken.
        self._second = SecondModel(
            self._plugins, self._config, self._model_config, self._device, self._operations,
            self._ranks, self._serving, beside=self._beside,
        )  # fmt: skip

    def _staged(self) -> SecondModel:
        if self._second is None:
            raise LoadError("no update is in progress")
        return self._second

    @torch.inference_mode()
    def _finish(self) -> WeightCount:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # The other thread's copies.
        with _explained("finishing new weights"):
            self._check_in_place()
            return self._staged().finish()

    def _check_in_place(self) -> None:
        """Raise LoadError if the serving model does not compute with what it was built with."""
        storages = self._serving.storages()
        for name, parameter in self._model.named_parameters():
            if parameter.numel() and parameter.untyped_storage().data_ptr() not in storages:
                raise LoadError(f"{name} was replaced after the start, so it cannot be updated")

    @torch.inference_mode()
    def apply(self, job: ApplyWeights) -> None:
        """Copy the second model into the serving one, and forget it."""
        second, self._second = self._staged(), None
        second.apply()
        self.memory.forget_copies()

    def close(self) -> None:
        """Leave the groups, and end the thread."""
        self._senders.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._second = None


class _explained:
    """Turns a lack of memory into an error that names what to do."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise explain_oom(error, self._what) from error
