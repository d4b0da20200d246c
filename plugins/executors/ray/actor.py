"""What runs in a process of Ray: it holds one GPU of its host, and runs the rank that uses it.

Imports nothing large before the environment is complete. Plans and results do not pass through Ray.
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
    """An actor with two threads: `run` takes one of them to the end."""

    def gpu(self) -> str:
        """Return Ray's name of the GPU that it gives this actor."""
        ids: list[str] = _ray_context().get_accelerator_ids()["GPU"]
        return ids[0]

    def process(self, gpus: bool) -> tuple[int, int]:
        """Return the number of this process, and that of its device in it; `gpus`: whether it is
        a GPU. Raises ConfigError."""
        device = device_number(self.gpu(), os.environ.get(VISIBLE)) if gpus else 0
        return os.getpid(), device

    def run(
        self, address: tuple[str, int], secret: bytes, rank: int, environment: Mapping[str, str]
    ) -> None:
        """Run the rank until rank 0 ends it. `address`: of rank 0; `environment`: variables that
        are set here unless the host has them. Raises OSError."""
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        from ..follower import Follower, end_with
        from ..progress import Progress
        from .connections import connect

        connection = connect(address, secret, rank)
        threading.Thread(target=end_with, args=(connection,), daemon=True).start()
        Follower(connection, Progress.create(), sends_progress=True).run()

    def dump_stacks(self) -> None:
        """Write the stacks of all threads to standard error, which Ray shows rank 0's user."""
        faulthandler.dump_traceback(file=2)


def device_number(gpu: str, visible: str | None) -> int:
    """Return torch's number of a GPU that Ray names, in a process with these VISIBLE devices.
    Raises ConfigError if it does not see that GPU."""
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
