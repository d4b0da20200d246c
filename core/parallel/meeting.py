"""Where engines of one host meet that divide a mixture's experts among all of their ranks."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]

from ..errors import EngineStopped

VARIABLE = "JACKFIELD_EXPERT_ENGINES"
"""host:port:number of a member's process, from which its ranks have it."""
HOST = "127.0.0.1"
LOOK_SECONDS = 600.0
"""Default timeout of `Engine.hears`."""


class MeetingPlace:
    """The store, in the process that starts the engines."""

    def __init__(self) -> None:
        # One that the store opens would be reached from other hosts.
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def environment(self, engine: int) -> dict[str, str]:
        """Return the variables that bring an engine's ranks here."""
        return {VARIABLE: f"{HOST}:{self._store.port}:{engine}"}


class Engine(NamedTuple):
    """One of the engines, for its ranks."""

    number: int
    store: TCPStore

    @classmethod
    def of_environment(cls) -> Engine:
        """Join the meeting. Raises EngineStopped in a process that no engine started."""
        value = os.environ.get(VARIABLE)
        if value is None:
            raise EngineStopped("ranks that divide experts among engines are started by these")
        host, port, number = value.split(":")
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        return cls(int(number), store)

    def tell(self, name: str, value: str = "") -> None:
        """Let the others know a value."""
        self.store.set(name, value)

    def forget(self, name: str) -> None:
        """Take back a value."""
        self.store.delete_key(name)

    def hears(self, name: str, seconds: float = LOOK_SECONDS) -> bool:
        """Wait until another engine tells a value; return whether one has within so many seconds.
        Blocks this store. Raises RuntimeError once the meeting is over."""
        try:
            self.store.wait([name], timedelta(seconds=seconds))
        except DistStoreError:
            return False
        return True

    def wait(self, name: str, seconds: float) -> str:
        """Return the value once another engine has set it. Blocks this store. Raises
        EngineStopped after so many seconds."""
        if not self.hears(name, seconds):
            raise EngineStopped(f"the other engines have not set {name} for {seconds:g} seconds")
        return str(self.store.get(name).decode())
