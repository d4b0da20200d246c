"""Guards the engine against errors of the scheduler half of a KV connector."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ...parts.kv_transfer import KVReport
from ...protocols.kv import KVCodec, KVConnectorScheduler
from ...request import Request

logger = logging.getLogger("jackfield.engine")
T = TypeVar("T")


class GuardedConnector:
    """Calls a connector until it raises or breaks its contract.

    Then every method except `close` acts like an empty connector's, as its state is unreliable.
    """

    def __init__(
        self,
        connector: KVConnectorScheduler,
        codec: KVCodec,
        who: Callable[[BaseException], str] | None = None,
    ) -> None:
        """who: error → connector's name, with its distribution."""
        self._connector = connector
        self._codec = codec
        self._who = who or (lambda error: "the KV connector")
        self.failure: str | None = None
        """Why the connector is not called; None: it works."""

    def detach(self, failure: str) -> None:
        """Stop calling the connector, whose worker half failed."""
        self.failure = self.failure or failure

    def num_external_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        def look_up() -> int | None:
            count = self._connector.num_external_tokens(request, num_computed_tokens)
            return None if count is None else operator.index(count)

        without: int | None = 0
        return self._call("num_external_tokens", look_up, without)

    def start_load(
        self, transfer: int, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        self._call(
            "start_load",
            lambda: self._connector.start_load(transfer, request, keys, block_ids),
            None,
        )

    def start_save(
        self, transfer: int, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> Sequence[int]:
        def start() -> list[int]:
            saved = list(self._connector.start_save(transfer, request, keys, block_ids))
            if not set(saved) <= set(block_ids):
                raise ValueError("it asks for blocks that it was not offered")
            return saved

        return self._call("start_save", start, [])

    def request_finished(
        self, transfer: int, request: Request
    ) -> tuple[bool, dict[str, Any] | None]:
        def finish() -> tuple[bool, dict[str, Any] | None]:
            is_retained, params = self._connector.request_finished(transfer, request)
            if not isinstance(params, dict | None):
                raise TypeError(f"kv_transfer_params must be a dict, got {type(params).__name__}")
            return bool(is_retained), params

        without: tuple[bool, dict[str, Any] | None] = (False, None)
        return self._call("request_finished", finish, without)

    def build_metadata(self) -> bytes | None:
        """Return the encoded metadata."""

        def build() -> bytes | None:
            return self._codec.encode_metadata(self._connector.build_metadata())

        without: bytes | None = None
        return self._call("build_metadata", build, without)

    def update(self, report: KVReport) -> None:
        self._call(
            "update", lambda: self._connector.update(self._codec.decode_report(report)), None
        )

    def close(self) -> None:
        """Close the connector, even after a failure. Raises what it raises."""
        self._connector.close()

    def _call(self, method: str, call: Callable[[], T], without: T) -> T:
        if self.failure is not None:
            return without
        try:
            return call()
        except (Exception, SystemExit) as error:
            plugin = self._who(error)
            self.failure = f"{plugin} failed in {method}: {type(error).__name__}: {error}"
            logger.error(
                "%s; it is detached until the engine is started anew, and requests go on without "
                "it", self.failure, exc_info=error,
            )  # fmt: skip
            return without
