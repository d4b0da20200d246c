"""Guards the engine against exceptions of a KV connector's worker half."""

from __future__ import annotations

import logging
import operator
import queue
import threading
from collections.abc import Callable, Sequence

import msgspec
import torch

from ...parts.kv_transfer import KVDetached, KVReport
from ...protocols.kv import KVCodec, KVConnectorWorker

logger = logging.getLogger("jackfield.worker")


class GuardedHalf:
    """Calls a worker half until it raises, or returns what its contract does not allow.

    From then on only `close` is called, at once and on a thread of its own: it may wait for pending
    saves, while steps continue. Until it has returned the half may read and write the blocks of
    its transfers; when it raises, for good.

    Reports of the half are kept until a step has delivered them, so that a failed step loses none.
    """

    def __init__(
        self,
        half: KVConnectorWorker,
        codec: KVCodec,
        device: torch.device,
        who: Callable[[BaseException], str],
        notify: Callable[[], None],
    ) -> None:
        """who: error → the connector's name for the log, with its provenance; notify: requests a
        step that delivers reports; called from any thread."""
        self._half = half
        self._codec = codec
        self._device = device
        self._who = who
        self._notify = notify
        self._reports: queue.SimpleQueue[KVReport] = queue.SimpleQueue()
        """The launch thread adds reports, the completion thread removes them."""
        self._detached: KVDetached | None = None
        self._closing: threading.Thread | None = None
        self._closed: bool | None = None
        """True once `close` has returned, False once it has raised; None before either."""

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Register the caches, before any step. Raises what the half raises: the start fails."""
        self._half.bind(kv_caches)

    def start(self, metadata: bytes) -> None:
        """Decode and pass on the metadata of a plan."""
        self._call("start", lambda: self._half.start(self._codec.decode_metadata(metadata)))

    def poll(self) -> None:
        """Collect the reports of the half; if it is detached, check whether it has been closed."""
        self._call("poll", self._take_report)
        detached, closed = self._detached, self._closed
        if detached is None or closed is None or detached.closed is not None:
            return
        if closed and self._device.type == "cuda":
            # Kernels that the half's threads have launched must end, too.
            torch.cuda.synchronize(self._device)
        self._detached = msgspec.structs.replace(detached, closed=closed)

    def news(self) -> tuple[KVReport | None, KVDetached | None]:
        """Return, for the result of a step, the oldest undelivered report; after all of them, that
        the half is detached. Runs on the completion thread."""
        detached = self._detached
        try:
            report = self._reports.get_nowait()
        except queue.Empty:
            return None, detached
        if detached is not None or not self._reports.empty():
            self._notify()
        return report, None

    def detach(self, failure: str) -> None:
        """Close the half as after an exception of its own: that of another rank has raised."""
        if self._detached is not None:
            return
        self._detached = KVDetached(failure)
        self._closing = threading.Thread(
            target=self._close_and_tell, name="jackfield-kv-close", daemon=True
        )
        self._closing.start()

    def close(self) -> None:
        """Close the half and wait for it; called when the engine stops. Its exceptions are
        logged."""
        if self._closing is not None:
            self._closing.join()
        elif self._detached is None:
            self._close()

    def _take_report(self) -> None:
        report = self._half.poll()
        if report is None:
            return
        if not isinstance(report, KVReport):
            raise TypeError(f"a report must be a KVReport, got {type(report).__name__}")
        finished = tuple(map(operator.index, report.finished))
        failed = {
            operator.index(transfer): tuple(map(operator.index, block_ids))
            for transfer, block_ids in report.failed.items()
        }
        checked_report = KVReport(finished=finished, failed=failed, payload=report.payload)
        self._reports.put(self._codec.encode_report(checked_report))

    @torch.inference_mode()
    def _call(self, method: str, call: Callable[[], None]) -> None:
        if self._detached is not None:
            return
        try:
            call()
        except (Exception, SystemExit) as error:
            failure = f"{self._who(error)} failed in {method}: {type(error).__name__}: {error}"
            logger.error(
                "%s; it is detached until the engine is started anew, and requests go on without "
                "it", failure, exc_info=error,
            )  # fmt: skip
            self.detach(failure)

    def _close(self) -> None:
        try:
            self._half.close()
            self._closed = True
        except (Exception, SystemExit) as error:
            logger.error(
                "%s failed in close: %s: %s", self._who(error), type(error).__name__, error,
                exc_info=error,
            )  # fmt: skip
            self._closed = False

    def _close_and_tell(self) -> None:
        if self._device.type == "cuda":
            # Of this thread: calls without a device would make a context on the first one.
            torch.cuda.set_device(self._device)
        self._close()
        self._notify()
