"""Bodies into requests, by msgspec: which fields are known, refused or ignored.

Unknown fields are ignored, as OpenAI's clients add new ones. Unsupported fields are refused if
their value has an effect. Older fields that clients always send are ignored with a log line.
"""

from __future__ import annotations

import codecs
import functools
import logging
from typing import Any, TypeVar

import msgspec

from ....core.errors import InvalidRequest, shortened
from ...http.unreadable_values import unreadable_value
from ...http.whole_numbers import integers_of, with_integers

logger = logging.getLogger("jackfield.server")
T = TypeVar("T")

UNSUPPORTED = {
    "suffix": "this server completes from the left only; send what comes before as the prompt",
    "functions": "OpenAI's older form; use tools",
    "function_call": "OpenAI's older form; use tool_choice",
    "audio": "this server's models write text",
    "modalities": "this route has no such choice",
    "web_search_options": "there is no web search here; give the model a tool",
    "use_beam_search": "POST /v1/completions and /v1/chat/completions search",
    "chat_template": "only POST /v1/chat/completions takes one",
    "documents": "only POST /v1/chat/completions takes them",
    "prompt_embeds": "POST /v1/completions takes them",
    "moderation": "there is no model that moderates",
    "logits_processors": "requests cannot contain code",
    "mm_processor_kwargs": "POST /v1/chat/completions takes them",
    "media_io_kwargs": "it is an option of the server, --media-io-kwargs",
    "ec_transfer_params": "this server's models have no encoder",
    "repetition_detection": "see repetition_penalty and stop",
    "return_prompt_text": "POST /tokenize renders a chat, POST /detokenize shows it",
    "return_token_offsets": "POST /tokenize gives each token's text: return_token_strs",
    "return_assistant_tokens_mask": "there is no route that renders a chat for training",
    "logprob_token_ids": "log-probabilities are those of the most likely tokens: top_logprobs",
    "lora_path": "an adapter's name is the request's model",
    "watermarking": "there is no watermark",
    "thinking_token_budget": "reasoning cannot be cut off; see max_tokens and reasoning_effort",
}
"""Field → why it is refused, or what to use. Requests' classes add to these."""
IGNORED = {
    "guided_decoding_backend": "the server chooses: --structured-outputs-config.backend",
    "guided_whitespace_pattern": "see --structured-outputs-config.disable-any-whitespace",
}
"""Older field without effect → what to use."""
EMPTY: tuple[Any, ...] = (None, False, "", [], {})
"""Values without effect in an unsupported field."""
NOTHING = {"function_call": ("auto", "none")}
"""Further such values of one field."""


@functools.cache
def _log_ignored(name: str) -> None:
    logger.info("%s: is ignored: %s", name, IGNORED[name])


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a request; null means omitted. Raises InvalidRequest with the field's path."""
    return convert(parse(body), kind)


def parse(body: bytes) -> dict[str, Any]:
    """Decode a JSON object, skipping a byte order mark. Raises InvalidRequest."""
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(body, error) from None
    if not isinstance(raw, dict):
        raise InvalidRequest("the body must be a JSON object")
    return raw


def not_json(body: bytes, error: Exception) -> InvalidRequest:
    """Return the error of a body that cannot be decoded, with the field of a value that cannot."""
    value = unreadable_value(body)
    if value is None:
        return InvalidRequest(f"the body is not JSON: {error}")
    return InvalidRequest(f"{value.path or 'body'}: {value.reason}", param=value.path or None)


def convert(raw: dict[str, Any], kind: type[T]) -> T:
    for name, why in {**UNSUPPORTED, **getattr(kind, "UNSUPPORTED", {})}.items():
        is_set = name in raw and raw[name] not in (*EMPTY, *NOTHING.get(name, ()))
        if is_set and name not in kind.__struct_fields__:  # type: ignore[attr-defined]
            raise InvalidRequest(f"{name}: is not supported: {why}", param=name)
    for name in IGNORED.keys() & raw.keys():
        if raw[name] not in EMPTY:
            _log_ignored(name)
    raw = {name: value for name, value in raw.items() if value is not None}
    raw = with_integers(raw, integers_of(kind))  # type: ignore[arg-type]
    try:
        return msgspec.convert(raw, kind, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `")
        path = place.rpartition("`$")[2] if "`$" in place else place  # "key` in `$.name`"
        param = path.rstrip("`").removeprefix("$").removeprefix(".").replace("[...]", "") or None
        if param is None and "`" in message:
            param = message.split("`")[-2]
        if place.startswith("key` in "):
            message = f"wrong key: {message}"
        param = param and shortened(param)
        raise InvalidRequest(f"{param or 'body'}: {shortened(message)}", param=param) from None
