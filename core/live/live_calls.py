"""The methods of `AsyncEngine` for live operation: to pause, to take other weights, to sleep."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .engine_jobs import (
    LEASE_SECONDS,
    TAGS,
    AskLive,
    BeginUpdate,
    CallWorkers,
    LiveJob,
    Pause,
    PauseMode,
    Resume,
    Sleep,
    WakeUp,
)
from .weight_update import WeightUpdate

if TYPE_CHECKING:
    from .weight_update import Weights


class LiveCalls(ABC):
    """Each is a `LiveJob`, or a few."""

    @abstractmethod
    async def ask_live(self, job: LiveJob) -> dict[str, Any]:
        """Do a job on the living engine, and return what it says. Raises as it says."""

    async def pause_generation(
        self,
        mode: PauseMode = "abort",
        *,
        clear_cache: bool = True,
        lease: float | None = LEASE_SECONDS,
    ) -> dict[str, Any]:
        """Launch no further step, and return once the device is idle, with what `AskLive` says.

        mode: "abort" ends requests with what they have, "wait" lets them run to their end first;
        new requests are refused with EnginePaused. "keep" lets requests go on after the pause, and
        new ones wait. clear_cache: forget cached prefixes; kept requests are computed again. lease:
        seconds after which the pause ends by itself; None: never.
        """
        return await self.ask_live(Pause(mode=mode, clear_cache=clear_cache, lease=lease))

    async def resume_generation(self) -> None:
        """End a pause. Harmless without one."""
        await self.ask_live(Resume())

    async def is_paused(self) -> bool:
        """Return whether a pause has brought the engine to rest."""
        return bool((await self.ask_live(AskLive()))["is_paused"])

    async def weights_version(self) -> str:
        """Return the version of the weights that serve: "default" until the first update."""
        return str((await self.ask_live(AskLive()))["weights_version"])

    async def begin_weight_update(self, *, lease: float | None = LEASE_SECONDS) -> WeightUpdate:
        """Begin to take other weights while the present ones serve, which needs as much memory as
        the model.

        lease: seconds without a call about it after which it is given up; None: never. Raises
        Conflict while another one is in progress.
        """
        return await WeightUpdate.begin(self.ask_live, BeginUpdate(lease=lease))

    async def update_weights(
        self, weights: Weights, *, version: str | None = None, recompute: bool | None = None
    ) -> dict[str, Any]:
        """Serve with other weights from now on, all of them or none. Return what `CommitUpdate`
        says.

        weights: a checkpoint's folder on the engine's machine, or its tensors: (name, tensor), each
        once. version: their name. recompute: whether requests that run are computed again with the
        new weights; None: unless a pause keeps them with their caches. Raises InvalidRequest if the
        weights are not whole or do not fit, and then the old ones serve on.
        """
        async with await self.begin_weight_update() as update:
            if isinstance(weights, str | os.PathLike):
                await update.read(weights)
            else:
                await update.put(weights)
            return await update.commit(version, recompute=recompute)

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> dict[str, Any]:
        """Pause, and give the memory of weights and caches back; return what `Sleep` says.

        level: 1 keeps the weights' numbers in host memory, 2 drops them. mode: what becomes of
        requests, as in `pause_generation`.
        """
        return await self.ask_live(Sleep(level=level, mode=mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Take the memory again, of "weights" or "kv_cache" alone if asked; once all is there,
        requests run. Return what `WakeUp` says. Dropped weights are read again."""
        return await self.ask_live(WakeUp(tags=TAGS if tags is None else tuple(tags)))

    async def is_sleeping(self) -> bool:
        """Return whether memory is given back, of weights or caches."""
        return bool((await self.ask_live(AskLive()))["is_sleeping"])

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method that a part of a plugin offers (`WorkerPart.methods`) on each rank, between
        two steps; return what the first rank of each engine returns.

        timeout: seconds to wait; the call goes on. Raises InvalidRequest for other names,
        TimeoutError, and PluginError if it raises.
        """
        job = CallWorkers(method=method, args=tuple(args), kwargs=dict(kwargs or {}))
        answer = await asyncio.wait_for(self.ask_live(job), timeout)
        return list(answer["results"])
