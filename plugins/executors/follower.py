"""A rank other than 0: a process that runs the same plans and jobs as rank 0, in the same order.

Run as `python -m jackfield.plugins.executors.follower CONNECTION PROGRESS PARENT`: descriptors of
its socket and of the memory for its progress, and the process that started it. It ends with that
process, and leaves signals to it. Over TCP, rank 0 is on another host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import sys
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec

from ...core.parts import kv_transfer
from ...core.parts.kv_transfer import TransferResult
from ...core.remote.frames import encode
from ...core.remote.processes import follow_parent
from ...core.worker.serving_process import freeze
from .messages import (
    Beat,
    Detach,
    Done,
    End,
    Failed,
    HasReport,
    Inbox,
    Job,
    Joining,
    Log,
    PlanRows,
    Ready,
    Setup,
    Step,
    ToFollower,
    Transferred,
)
from .progress import BEAT_SECONDS, Progress

if TYPE_CHECKING:
    from ...core.parts.kv_transfer import KVDetached
    from ...core.step import StepResult
    from ...core.worker.threads import PendingStep
    from .rank import RankWorker


def main() -> int:
    connection_number, progress_number, parent = map(int, sys.argv[1:])
    if not follow_parent(parent):
        return 1
    connection = socket.socket(fileno=connection_number)
    threading.Thread(target=end_with, args=(connection,), daemon=True).start()
    progress = Progress(os.fdopen(progress_number, "r+b"))
    elsewhere = connection.family != socket.AF_UNIX
    return Follower(connection, progress, sends_progress=elsewhere).run()


def end_with(connection: socket.socket) -> None:
    """End this process when the other side closes the connection."""
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", 0))  # And POLLHUP, which is always on.
    poll.poll()
    os._exit(1)


class Follower:
    """Runs one rank. `run`'s thread launches steps; a second one waits for the device."""

    def __init__(
        self, connection: socket.socket, progress: Progress, *, sends_progress: bool = False
    ) -> None:
        """sends_progress: rank 0 does not share the memory of `progress`."""
        self._sends_progress = sends_progress
        self._connection = connection
        self._progress = progress
        self._inbox: Inbox[ToFollower] = Inbox(connection, ToFollower)
        self._sending = threading.Lock()
        self._rows = PlanRows()
        self._detached: KVDetached | None = None
        """The detached worker half, as reported to rank 0."""
        self._launched: queue.SimpleQueue[tuple[int, PendingStep]] = queue.SimpleQueue()
        self._flying = 0
        """Most steps in flight, as for rank 0."""
        self._free = threading.Semaphore(0)

    def run(self) -> int:
        """Run the rank until it ends; return the exit status."""
        from ...core.registration.step_parts import part_types
        from .rank import start_rank  # Torch, while the first message is on its way.

        setup = self._inbox.take()
        if not isinstance(setup, Setup):
            return 1
        logging.basicConfig(handlers=[_Forwarding(self)], level=setup.log_level)
        threading.Thread(target=self._beat, args=(threading.get_ident(),), daemon=True).start()
        try:
            joined, info = start_rank(
                setup.config,
                setup.plugins,
                setup.rank,
                setup.local_rank,
                setup.address,
                self._progress,
                lambda: self.send(Joining()),
            )
        except BaseException as error:
            self.send(Failed.from_error(0, error))
            self._wait_for_end()
            return 1
        joined.worker.transfer_news = self._has_report
        self._rows = PlanRows(part_types(joined.worker.plugins, joined.worker.config))
        self._flying = info.steps_in_flight
        self._free.release(self._flying)
        threading.Thread(target=self._complete, daemon=True).start()
        freeze()
        self.send(Ready(info))
        while not isinstance(message := self._inbox.take(), End):
            if isinstance(message, Step):
                self._step(joined, message)
            elif isinstance(message, Job):
                self._do(joined, message)
            elif isinstance(message, Detach):
                joined.detach_connector(message.failure)
            else:
                return 1
        self._settle()
        joined.stop()
        return 0

    def send(self, message: msgspec.Struct) -> None:
        """Send a message to rank 0. Thread-safe."""
        frame = encode(message)
        with self._sending:
            self._connection.sendall(frame)

    def _has_report(self) -> None:
        """Called from threads of a KV connector, even after rank 0's end."""
        with contextlib.suppress(OSError):
            self.send(HasReport())

    def _wait_for_end(self) -> None:
        """Wait until rank 0 allows the end: other ranks may use connections to this process."""
        while not isinstance(self._inbox.take(), End | None):
            pass

    def _step(self, joined: RankWorker, step: Step) -> None:
        self._free.acquire()
        self._progress.start(step.number)
        try:
            pending = joined.worker.step(self._rows.plan_of(step))
        except BaseException as error:
            self._end_step(step.number, error)
        else:
            self._launched.put((step.number, pending))

    def _complete(self) -> None:
        while True:
            number, pending = self._launched.get()
            try:
                self._report(pending.wait())
            except BaseException as error:
                self._end_step(number, error)
            else:
                self._end_step(number, None)
            del pending

    def _report(self, result: StepResult) -> None:
        """Send the report of a KV connector's worker half."""
        sent: TransferResult = result.parts.get(kv_transfer.NAME, TransferResult())
        report, detached = sent.report, sent.detached
        if report is None and detached == self._detached:
            return
        self._detached = detached
        if report is not None and report.payload is not None:
            report = msgspec.structs.replace(report, payload=None)
        self.send(Transferred(report, detached))

    def _end_step(self, number: int, error: BaseException | None) -> None:
        self._progress.finish(number)
        if error is not None:
            self.send(Failed.from_error(number, error))
        self._free.release()

    def _settle(self) -> None:
        for _ in range(self._flying):
            self._free.acquire()
        self._free.release(self._flying)

    def _do(self, joined: RankWorker, job: Job) -> None:
        self._settle()
        self._progress.start(job.number)
        try:
            result = joined.run_job(job.job)
        except BaseException as error:
            self.send(Failed.from_error(job.number, error))
        else:
            if isinstance(result, Future):  # It goes on on another thread.
                result.add_done_callback(lambda done: self._reply(job.number, done.exception()))
            else:
                self.send(Done(job.number))
        self._progress.finish(job.number)

    def _reply(self, number: int, error: BaseException | None) -> None:
        """Say how a job has ended."""
        self.send(Done(number) if error is None else Failed.from_error(number, error))

    def _beat(self, launch_thread: int) -> None:
        while True:
            self._progress.beat(launch_thread)
            if self._sends_progress:
                try:
                    self.send(Beat(self._progress.counts()))
                except OSError:
                    return  # This process ends with the connection.
            time.sleep(BEAT_SECONDS)


class _Forwarding(logging.Handler):
    """Sends log records to rank 0."""

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self._follower = follower

    def emit(self, record: logging.LogRecord) -> None:
        """Ignore connection errors: this process ends with the connection."""
        try:
            text = self.format(record)
            self._follower.send(Log(record.levelno, record.name, text))
        except Exception:
            self.handleError(record)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # Libraries take long to unload, and nothing of this process is left to keep.
