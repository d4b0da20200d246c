"""Profiles a worker's launches and its device with torch's profiler."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..step import StartProfile, StepPlan

_NO_RANGE: AbstractContextManager[object] = contextlib.nullcontext()


class WorkerProfiler:
    """For the launch thread only: what other threads do on the CPU is not in the trace."""

    def __init__(self, device: torch.device, rank: int, *, nvtx: bool = False) -> None:
        """nvtx: steps are NVTX ranges, too."""
        self._device = device
        self._nvtx = nvtx
        self._rank = rank
        self._profile: profile | None = None
        self._path = Path()

    def start(self, job: StartProfile) -> None:
        """Begin; what an earlier profile has seen is dropped. Raises OSError for the folder."""
        self.close()
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._path = Path(job.folder) / f"{job.name}.rank{self._rank}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile = profile(
            activities=activities,
            record_shapes=job.record_shapes,
            profile_memory=job.with_memory,
            with_stack=job.with_stack,
        )
        self._profile.start()

    def stop(self) -> str:
        """End, and write the trace. Return its path, "" if there was no profile."""
        ended, self._profile = self._profile, None
        if ended is None:
            return ""
        ended.stop()
        ended.export_chrome_trace(str(self._path))
        os.chmod(self._path, 0o600)
        return str(self._path)

    def step_range(self, plan: StepPlan) -> AbstractContextManager[object]:
        """Return a context that names what a step launches."""
        if self._profile is None and not self._nvtx:
            return _NO_RANGE
        name = f"step {plan.step}: {plan.total_tokens} tokens"
        ranges = contextlib.ExitStack()
        if self._nvtx:
            ranges.enter_context(torch.cuda.nvtx.range(name))
        if self._profile is not None:
            ranges.enter_context(record_function(name))
        return ranges

    def close(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
