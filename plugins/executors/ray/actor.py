"""Runs in a Ray process: it holds one GPU of its host, and runs a rank on it.

Imports nothing large before the environment is complete. Plans and results bypass Ray.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Mapping
from typing import Any

from ....core.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


class RankActor:
    """An actor with two threads, one of which `run` occupies."""

    def gpu(self) -> str:
        """Return Ray's name of this actor's GPU."""
        ids: list[str] = _ray_context().get_accelerator_ids()["GPU"]
        return ids[0]

    def process(self, gpus: bool) -> tuple[int, int]:
        """Return the process's number, and its device's; `gpus`: whether it is a GPU. Raises
        ConfigError.
        """
        device = device_number(self.gpu(), os.environ.get(VISIBLE)) if gpus else 0
        return os.getpid(), device

    def run(
        self, address: tuple[str, int], secret: bytes, rank: int, environment: Mapping[str, str]
    ) -> None:
        """Run the rank until rank 0 ends it. `address`: of rank 0; `environment`: defaults of
        variables. Raises OSError.
        """
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        from ..connections import connect
        from ..follower import Follower, end_with
        from ..progress import Progress

        connection = connect(address, secret, rank)
        threading.Thread(target=end_with, args=(connection,), daemon=True).start()
        Follower(connection, Progress.create(), sends_progress=True).run()

    def dump_stacks(self) -> None:
        """Write the stacks of all threads to standard error, which Ray forwards to rank 0's
        user.
        """
        faulthandler.dump_traceback(file=2)


def device_number(gpu: str, visible: str | None) -> int:
    """Return torch's number of Ray's GPU, in a process with these VISIBLE devices. Raises
    ConfigError if it is not visible.
    """
    if visible is None:
        return int(gpu)
    names = [name.strip() for name in visible.split(",")]
    if gpu not in names:
        raise ConfigError(
            f"executor: Ray gave this process the GPU {gpu}, which {VISIBLE}={visible} hides; "
            "set it for `ray start`, not for one program",
            param="executor",
        )
    return names.index(gpu)


def _ray_context() -> Any:
    import ray

    return ray.get_runtime_context()
