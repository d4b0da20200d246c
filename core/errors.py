"""The error family: each error knows its HTTP status and its OpenAI error type."""

from __future__ import annotations

from collections.abc import Iterable

SHOWN = 200
"""Characters of a refused value that its refusal repeats."""


def shown(value: object) -> str:
    """A refused value for an error's message: as Python writes it, cut where it is long."""
    if isinstance(value, str | bytes | list | tuple):
        value = value[:SHOWN]  # Nobody waits for a million items to be written out.
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def listed(names: Iterable[str], limit: int = 8) -> str:
    """For messages: "a, b, c", or the first of many and how many more there are."""
    found = list(names)
    more = f" and {len(found) - limit} more" if len(found) > limit else ""
    return ", ".join(found[:limit]) + more


class JackfieldError(Exception):
    """Base of every error that Jackfield raises on purpose.

    `param` names the offending field, where there is one.
    """

    status = 500
    error_type = "server_error"
    code: str | None = None
    retry_after: int | None = None
    """Seconds after which it may be worth to try again: the header Retry-After."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(JackfieldError):
    """A request that cannot be served as asked: wrong type, out of range, too long."""

    status = 400
    error_type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, alone or with the tokens asked for, does not fit in `max_model_len`."""

    code = "context_length_exceeded"
    limit: int | None = None
    """Tokens that the context holds."""
    num_prompt_tokens: int | None = None

    @classmethod
    def of(
        cls, limit: int, num_prompt_tokens: int, reason: str, *, param: str
    ) -> ContextLengthExceeded:
        """With OpenAI's sentence, by which clients recognise this refusal and fall back to a model
        with a longer context; `reason`: what comes after its "However, ".
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
    """The request names something that is not here, or is here no more."""

    status = 404


class Forbidden(InvalidRequest):
    """The request is understood and not allowed: from a page of another site, under a name that is
    not the server's."""

    status = 403
    error_type = "permission_error"


class BodyTooLarge(InvalidRequest):
    """The body, or what is packed in it, is larger than the server takes."""

    status = 413


class UnsupportedMediaType(InvalidRequest):
    """The body is of a type, or packed in a way, that the route does not take."""

    status = 415


class RateLimited(JackfieldError):
    """The caller has used up what it may use for now; `retry_after` says when there is more."""

    status = 429
    error_type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after = 1


class NotSupported(JackfieldError):
    """A feature that Jackfield does not have (yet); the message names it."""

    status = 501
    error_type = "not_supported_error"


class EngineOverloaded(JackfieldError):
    """A configured limit on waiting requests is reached; try again later."""

    status = 503
    error_type = "overloaded_error"
    retry_after = 1


class TooManyConnections(EngineOverloaded):
    """As many connections are open as may be, all of them with requests."""


class EngineStopped(JackfieldError):
    """The engine is stopping, has stopped, or lost its device."""

    status = 503
    error_type = "service_unavailable_error"
    retry_after = 5


class RequestFailed(JackfieldError):
    """One request failed inside the engine; the others go on."""


class ConfigError(JackfieldError, ValueError):
    """An engine option is unknown, out of range or at odds with another one."""

    status = 400
    error_type = "invalid_request_error"


class LoadError(JackfieldError):
    """A checkpoint cannot be loaded: a tensor is missing, unexpected or of another shape."""


class OutOfMemory(JackfieldError):
    """The device cannot hold what was asked for; the message says what to lower."""


class PluginError(JackfieldError):
    """A plugin failed to import, clashes with another one, or does not exist."""
