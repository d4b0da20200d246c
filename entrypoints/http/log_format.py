"""Logs as JSON lines, and texts of clients in logs: cut, and with parts left out."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from ...core.hooks import hookimpl
from ...core.outputs import PoolingRequestOutput, RequestOutput

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""X-Request-Id of the request that a task belongs to."""
outputs = logging.getLogger("jackfield.outputs")
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
REDACTED = "[redacted]"
MAX_SEARCHED = 1 << 16
"""Characters in which patterns are searched; the rest is not logged."""


class JsonFormatter(logging.Formatter):
    """One JSON object per record, with the id of its HTTP request."""

    def format(self, record: logging.LogRecord) -> str:
        whole_ms = int(record.msecs)
        facts: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}"
            f".{whole_ms:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := REQUEST_ID.get()) is not None:
            facts["request_id"] = request_id
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            facts["stack"] = self.formatStack(record.stack_info)
        return json.dumps(facts, ensure_ascii=True, default=str)


def formatter(kind: str) -> logging.Formatter:
    return JsonFormatter() if kind == "json" else logging.Formatter(TEXT_FORMAT)


class LoggedText:
    """Makes a client's text fit for a log line."""

    def __init__(self, max_len: int | None, patterns: Sequence[str] = ()) -> None:
        """patterns: regular expressions whose matches are not logged."""
        self._max_len = max_len
        self._pattern = re.compile("|".join(f"(?:{p})" for p in patterns)) if patterns else None

    def __call__(self, text: str) -> str:
        """Return a text as a JSON string, so that it cannot begin a line."""
        shown, is_cut = text, False
        if self._pattern is not None:
            # Searched before it is cut: half of a match would match no more.
            shown = self._pattern.sub(REDACTED, text[:MAX_SEARCHED])
            is_cut = len(text) > MAX_SEARCHED
        if self._max_len is not None and len(shown) > self._max_len:
            shown, is_cut = shown[: self._max_len], True
        return json.dumps(shown) + (f" … ({len(text)} characters)" if is_cut else "")


class OutputLog:
    """Logs what each request gave, from whichever route or batch."""

    def __init__(self, shown: LoggedText) -> None:
        self._shown = shown

    @hookimpl
    def request_finished(self, output: RequestOutput | PoolingRequestOutput) -> None:
        if isinstance(output, PoolingRequestOutput):
            num_prompt = len(output.prompt_token_ids)
            outputs.info("%s: pooled, %d tokens", json.dumps(output.request_id), num_prompt)
            return
        for completion in output.outputs:
            outputs.info(
                "%s[%d]: %s, %d tokens: %s",
                json.dumps(output.request_id),
                completion.index,
                completion.finish_reason,
                len(completion.token_ids),
                self._shown(completion.text),
            )
