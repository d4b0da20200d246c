"""Errors in Ollama's shape: `{"error": text}`."""

from __future__ import annotations

from typing import Any

from ...core.errors import JackfieldError
from ..http.routing import Dialect
from .response_schemas import OllamaError


def error_body(error: JackfieldError) -> dict[str, str]:
    return {"error": error.message.encode("utf-8", "backslashreplace").decode()}


def _of_openai(_: int, error: dict[str, Any]) -> dict[str, str]:
    return {"error": error["message"]}


OLLAMA = Dialect("Ollama", OllamaError, _of_openai)
