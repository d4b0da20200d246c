"""Files and batches in the form of OpenAI's API."""

from __future__ import annotations

import re
import time
import uuid
from typing import Any, Literal

import msgspec

from ...core.errors import InvalidRequest, shown

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
FINAL: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})
MAX_WINDOW = 30 * 86400
"""Seconds."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class NotFound(InvalidRequest):
    """The file or batch does not exist."""

    status = 404
    error_type = "not_found_error"
    code = "not_found"


class Conflict(InvalidRequest):
    """The operation is not possible in the object's state."""

    status = 409


class FileObject(msgspec.Struct, kw_only=True):
    """A stored file."""

    id: str
    bytes: int
    created_at: int
    """Unix time in seconds, as everywhere here."""
    filename: str
    purpose: Literal["batch", "batch_output"]
    expires_at: int | None = None
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class RequestCounts(msgspec.Struct):
    """Counts of a batch's requests."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct):
    """An error of a batch as a whole, or of a line of its file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    """A list of errors."""

    data: list[BatchError]
    object: Literal["list"] = "list"


class Batch(msgspec.Struct, kw_only=True):
    """A batch, as sent to clients and as stored."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    object: Literal["batch"] = "batch"
    status: BatchStatus = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None

    def turn(self, status: BatchStatus) -> None:
        """Set the status and its time."""
        self.status = status
        if status != "validating":
            setattr(self, f"{status}_at", int(time.time()))


class ExpiresAfter(msgspec.Struct):
    """When a file is deleted, relative to its creation."""

    anchor: Literal["created_at"]
    seconds: int

    def check(self, param: str) -> None:
        """Raise InvalidRequest if a value is outside OpenAI's bounds."""
        if not 3600 <= self.seconds <= 2592000:
            raise InvalidRequest(
                f"{param}.seconds: must be from 3600 to 2592000, got {self.seconds}",
                param=f"{param}.seconds",
            )


class CreateBatch(msgspec.Struct):
    """POST /v1/batches"""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None

    def check(self, endpoints: tuple[str, ...]) -> None:
        if self.endpoint not in endpoints:
            raise InvalidRequest(
                f"endpoint: must be {', '.join(endpoints)}; got {shown(self.endpoint)}",
                param="endpoint",
            )
        window_seconds(self.completion_window)
        if self.output_expires_after is not None:
            self.output_expires_after.check("output_expires_after")
        pairs = (self.metadata or {}).items()
        if len(pairs) > 16 or any(len(k) > 64 or len(v) > 512 for k, v in pairs):
            raise InvalidRequest(
                "metadata: at most 16 pairs, keys of 64 and values of 512 characters",
                param="metadata",
            )


def window_seconds(window: str) -> int:
    """Return a window in seconds: any number of s, m, h or d; OpenAI allows only "24h"."""
    match = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", window)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 <= seconds <= MAX_WINDOW:
        raise InvalidRequest(
            f"completion_window: must be like 24h, at most 30d; got {shown(window)}",
            param="completion_window",
        )
    return seconds


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def page(items: list[Any], limit: int) -> dict[str, Any]:
    """Return OpenAI's list of the first `limit` items; an extra item means that there are more."""
    data = items[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0].id if data else None,
        "last_id": data[-1].id if data else None,
        "has_more": len(items) > limit,
    }
