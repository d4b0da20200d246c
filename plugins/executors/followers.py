"""The other ranks' connections and processes, for rank 0."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from ...core.remote.frames import BadFrame, FrameReader
from ...core.remote.processes import describe_end
from .messages import Beat, Log, ToLeader
from .progress import Progress
from .spawn import take

PART = 1 << 16
"""Bytes per read."""
POLL_SECONDS = 0.02
logger = logging.getLogger("jackfield.worker")


class FollowerConnection(ABC):
    """The connection to one rank's process. For the event loop only."""

    reap_seconds: ClassVar[float] = 2.0
    """Seconds to wait for the exit status of a closed connection's process."""
    kill_seconds: ClassVar[float] = 10.0
    """Seconds to wait for a killed process, which a driver may delay."""
    local_rank: int
    """The device's number on its host."""
    host: str
    where = ""
    """The host for messages, with a preposition; "": this one."""

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        progress: Progress,
        *,
        received: Callable[[int, ToLeader], None],
        lost: Callable[[int, str], None],
    ) -> None:
        """received: rank, message; lost: rank, description of its end, called once unless `kill`
        came first.
        """
        self.rank = rank
        self.progress = progress
        self._received = received
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._reader: FrameReader[ToLeader] = FrameReader(ToLeader)
        self._unsent: collections.deque[memoryview] = collections.deque()
        self._closed = False
        self._socket = connection
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._read)

    def send(self, frame: bytes) -> None:
        """Send without waiting; the rest is sent later, in order."""
        if self._closed:
            return
        if self._unsent:
            self._unsent.append(memoryview(frame))
            return
        sent = self._write(frame)
        if sent < len(frame):
            self._unsent.append(memoryview(frame)[sent:])
            self._loop.add_writer(self._socket.fileno(), self._flush)

    def _write(self, data: bytes | memoryview) -> int:
        """Return the number of bytes sent. A lost connection takes all: `_read` detects it."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _flush(self) -> None:
        while self._unsent:
            data = self._unsent[0]
            if (sent := self._write(data)) < len(data):
                self._unsent[0] = data[sent:]
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._socket.fileno())

    def _read(self) -> None:
        try:
            data = self._socket.recv(PART)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._disconnect()
            self._report_end(time.monotonic() + self.reap_seconds)
            return
        try:
            for message in self._reader.read_frames(data):
                if isinstance(message, Beat):
                    self.progress.copy(message.counts)
                elif isinstance(message, Log):
                    logging.getLogger(message.name).log(
                        message.level, "rank %d: %s", self.rank, message.text
                    )
                else:
                    self._received(self.rank, message)
        except BadFrame as error:
            self._disconnect()
            self._lost(self.rank, f"sent an invalid frame: {error}")

    def lose(self) -> None:
        """Report the process's end, which the connection may not show."""
        if not self._closed:
            self._disconnect()
            self._report_end(time.monotonic())

    def _report_end(self, deadline: float) -> None:
        if (ending := self.ending()) is None and time.monotonic() < deadline:
            self._loop.call_later(POLL_SECONDS, self._report_end, deadline)
            return
        self._lost(self.rank, ending or describe_end(None))

    def _disconnect(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())

    def kill(self) -> None:
        self._disconnect()
        self._kill()

    async def close(self, seconds: float) -> None:
        """Wait for the process to end, and kill it after `seconds`."""
        await self._wait(seconds)
        self.kill()
        await self._wait(self.kill_seconds)
        if self.ending() is None:
            logger.error("rank %d%s was killed, and is still there", self.rank, self.where)
        self._socket.close()
        self.progress.close()

    async def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.ending() is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)

    @abstractmethod
    def ending(self) -> str | None:
        """Return a sentence's rest that describes the process's end; None if it is not known to
        have ended.
        """

    @abstractmethod
    def dump_stacks(self) -> None:
        """Make the process write the stacks of its threads to standard error."""

    @abstractmethod
    def _kill(self) -> None:
        """End the process."""


class FollowerProcess(FollowerConnection):
    """A rank in a child process on this host."""

    def __init__(
        self,
        rank: int,
        *,
        received: Callable[[int, ToLeader], None],
        lost: Callable[[int, str], None],
    ) -> None:
        """Start the process, or use a spare one."""
        self.process, connection, progress, _ = take()
        self.local_rank = rank
        self.host = socket.gethostname()
        super().__init__(rank, connection, progress, received=received, lost=lost)

    def ending(self) -> str | None:
        status = self.process.poll()
        return None if status is None else describe_end(status)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def dump_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
