"""Jackfield's exceptions, each with its HTTP status and its OpenAI error type."""

from __future__ import annotations

from collections.abc import Iterable

SHOWN = 200
"""Most characters of a refused value that an error message quotes."""


def shown(value: object) -> str:
    """Return the repr of a refused value for an error message, shortened if it is long."""
    if isinstance(value, str | bytes | list | tuple):
        value = value[:SHOWN]  # The repr of a container with a million items would take too long.
    return shortened(repr(value))


def shortened(text: str) -> str:
    """Return a text of the caller's for an error message, without the rest of a long one."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Return "a, b, c" for messages; of a long list, the first items and the number of the
    others."""
    items = list(names)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(map(shortened, items[:limit])) + more


class JackfieldError(Exception):
    """Base class of all errors that Jackfield raises deliberately.

    `param` names the offending field, where there is one.
    """

    status = 500
    error_type = "server_error"
    code: str | None = None
    retry_after: int | None = None
    """Seconds after which the client may try again: the header Retry-After."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(JackfieldError):
    """A request field is invalid: wrong type, out of range, too long."""

    status = 400
    error_type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, alone or with the requested output tokens, does not fit in `max_model_len`."""

    code = "context_length_exceeded"
    limit: int | None = None
    """The context length in tokens."""
    num_prompt_tokens: int | None = None

    @classmethod
    def of(
        cls, limit: int, num_prompt_tokens: int, reason: str, *, param: str
    ) -> ContextLengthExceeded:
        """Build the error with OpenAI's sentence, by which clients recognise it and fall back to a
        model with a longer context; `reason`: the text after "However, ".
        """
        error = cls(
            f"This model's maximum context length is {limit} tokens. However, {reason}",
            param=param,
        )
        error.limit, error.num_prompt_tokens = limit, num_prompt_tokens
        return error


class AuthenticationFailed(JackfieldError):
    """No API key, or a wrong one."""

    status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class ModelNotFound(JackfieldError):
    """The request names a model that this server does not serve."""

    status = 404
    error_type = "not_found_error"
    code = "model_not_found"


class NotFound(InvalidRequest):
    """The request names something that does not exist, or no longer exists."""

    status = 404


class Forbidden(InvalidRequest):
    """The request is not allowed: it comes from a page of another site, or under a host name that
    is not the server's; or its key has no right to it."""

    status = 403
    error_type = "permission_error"


class BodyTooLarge(InvalidRequest):
    """The body, compressed or decompressed, is larger than the server accepts."""

    status = 413


class UnsupportedMediaType(InvalidRequest):
    """The route does not accept the body's content type or encoding."""

    status = 415


class RateLimited(JackfieldError):
    """The caller has used up its current quota; `retry_after` says when to try again."""

    status = 429
    error_type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after = 1


class EngineOverloaded(JackfieldError):
    """A configured limit on waiting requests is reached; try again later."""

    status = 503
    error_type = "overloaded_error"
    retry_after = 1


class EnginePaused(EngineOverloaded):
    """The engine is paused or asleep, and takes no requests until it goes on."""


class Conflict(InvalidRequest):
    """What is asked does not go together with what goes on."""

    status = 409


class TooManyConnections(EngineOverloaded):
    """The maximum number of connections is open, and all of them have requests."""


class EngineStopped(JackfieldError):
    """The engine is stopping, has stopped, or lost its device."""

    status = 503
    error_type = "service_unavailable_error"
    retry_after = 5


class RankFailed(EngineStopped):
    """A rank of several has died, hangs, or failed where the others did not: the engine ends."""


class RequestFailed(JackfieldError):
    """One request failed inside the engine; the others go on."""


class ConfigError(JackfieldError, ValueError):
    """An engine option is unknown, out of range or at odds with another one."""

    status = 400
    error_type = "invalid_request_error"


class LoadError(JackfieldError):
    """A checkpoint cannot be loaded: a tensor is missing, unexpected or of another shape."""


class CheckpointNotFound(ConfigError, LoadError):
    """The configured place has no checkpoint, or lacks a file that a checkpoint must have."""


class OutOfMemory(JackfieldError):
    """The device does not have enough memory; the message names the option to lower."""


class PluginError(JackfieldError):
    """A plugin failed to import, clashes with another one, or does not exist."""


def error_named(name: str) -> type[JackfieldError] | None:
    """Return the class of this name, for an error that another process has sent; None if it is not
    one of these."""
    kind = globals().get(name)
    return kind if isinstance(kind, type) and issubclass(kind, JackfieldError) else None
