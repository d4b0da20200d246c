"""Types of items besides messages and reasoning, and their form in the prompt: a call, a result,
both, a text, or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from ....core.errors import InvalidRequest, shown
from ....core.media.sources import MediaPart, data_url, detail_of, file_part
from ...http.content_pieces import Turn, as_turn
from .client_tools import CLIENT_TOOLS, TOOL_OF_CALL
from .custom_tools import INPUT
from .tools import flat_name, read_tools

Item = dict[str, Any]
MEDIA = ("input_image", "input_audio", "input_file")
"""Types of parts that are items of media."""
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


class MediaContent(dict[str, Any]):
    """A picture, recording or file in an item, which knows what its request calls it."""

    def __init__(self, field: str, **fields: Any) -> None:
        super().__init__(fields)
        self.field = field


class PromptCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class Kind(msgspec.Struct, frozen=True):
    """Handling of one type of items."""

    prefix: str
    """Prefix of their ids."""
    check: Callable[[Item, str], None] = lambda item, path: None
    """Raises InvalidRequest with a faulty field's path."""
    call: Callable[[Item], PromptCall | None] = lambda item: None
    """The call of an item."""
    result: Callable[[Item], Turn | None] = lambda item: None
    """The result's text or texts, of a result or in a call."""
    text: Callable[[Item], str | None] = lambda item: None
    """The item's text for the model."""
    tools: bool = False
    """Whether an item brings tools."""
    elsewhere: bool = False
    """Whether another server ran the call, so no result follows."""


def call_id(item: Item) -> str:
    """Return the id that call and result share, by default the item's."""
    id = item.get("call_id")
    return id if isinstance(id, str) and id else str(item.get("id"))


# ---------------------------------------------------------------- checks


def text_field(item: Item, name: str, path: str, *, empty: bool = False) -> str:
    """Return a text field. Raises InvalidRequest."""
    value = item.get(name)
    if not isinstance(value, str) or (not value and not empty):
        what = "a text" if empty else "a non-empty text"
        raise InvalidRequest(
            f"{path}.{name}: must be {what}, got {type(value).__name__}", param=f"{path}.{name}"
        )
    return value


def texts_of(parts: Any, path: str) -> list[str]:
    """Return content parts' texts. Raises InvalidRequest with the part's path."""
    return [part["text"] for part in parts_of(parts, path, media=False)]


def parts_of(parts: Any, path: str, *, media: bool) -> list[Item]:
    """Return content parts, {"text": text} or media. Raises InvalidRequest with the part's path."""
    if not isinstance(parts, list):
        raise InvalidRequest(f"{path}: must be a text or a list of parts", param=path)
    items: list[Item] = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if media and isinstance(kind, str) and kind in MEDIA:
            items.append(_MEDIA_READERS[kind](part, f"{path}[{index}]"))
            continue
        text = part.get("refusal" if kind == "refusal" else "text") if kind in TEXT_PARTS else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f'{path}[{index}]: must be {{"type": "input_text", "text": "…"}}; {shown(kind)} '
                "parts are not supported here",
                param=f"{path}[{index}]",
            )
        items.append({"text": text})
    return items


def _picture(part: Item, path: str) -> MediaContent:
    url, where = part.get("image_url"), f"{path}.image_url"
    if not isinstance(url, str) or not url:
        raise InvalidRequest(
            f"{where}: must be a URL (data:…;base64,…); files are not kept here", param=where
        )
    detail = detail_of(part, path)
    return MediaContent(where, type="input_image", image_url=url, detail=detail)


def _recording(part: Item, path: str) -> MediaContent:
    audio, where = part.get("input_audio"), f"{path}.input_audio"
    if not isinstance(audio, dict):
        raise InvalidRequest(
            f'{where}: must be {{"data": base64, "format": "wav"}}, got {shown(audio)}', param=where
        )
    data = text_field(audio, "data", where)
    sound = {"data": data, "format": audio.get("format")}
    return MediaContent(f"{where}.data", type="input_audio", input_audio=sound)


def _file(part: Item, path: str) -> MediaContent:
    file_part(part, path, "input_file")
    fields = {name: part[name] for name in ("file_data", "filename") if name in part}
    return MediaContent(path, type="input_file", **fields)


_MEDIA_READERS = dict(zip(MEDIA, (_picture, _recording, _file), strict=True))


def _texts(*names: str, empty: tuple[str, ...] = ()) -> Callable[[Item, str], None]:
    """Return a check that fields are texts."""

    def check(item: Item, path: str) -> None:
        for name in names:
            text_field(item, name, path)
        for name in empty:
            text_field(item, name, path, empty=True)

    return check


def _check_output(item: Item, path: str) -> None:
    text_field(item, "call_id", path)
    if not isinstance(item.get("output"), str):
        output = item.get("output")
        parts = parts_of(output, f"{path}.output", media=True)
        item["output"] = [
            named if isinstance(named, MediaContent) else part
            for part, named in zip(output or (), parts, strict=True)
        ]


def _check_object(name: str) -> Callable[[Item, str], None]:
    def check(item: Item, path: str) -> None:
        if not isinstance(item.get(name), dict):
            raise InvalidRequest(f"{path}.{name}: must be an object", param=f"{path}.{name}")

    return check


def _check_tools(item: Item, path: str) -> None:
    read_tools([(f"{path}.tools", item.get("tools"))])


def _check_shell_output(item: Item, path: str) -> None:
    text_field(item, "call_id", path)
    if not isinstance(item.get("output"), list):
        raise InvalidRequest(f"{path}.output: must be a list", param=f"{path}.output")


# ---------------------------------------------------------------- what they are


def shown_texts(content: Any) -> Turn:
    """Return the text of a field that is a text or a list of parts; a list if several, or if one
    is an item of media."""
    if isinstance(content, str):
        return content
    return as_turn([
        _media_part(part)
        if part.get("type") in MEDIA
        else part["refusal" if part.get("type") == "refusal" else "text"]
        for part in content
    ])  # fmt: skip


def _media_part(part: Item) -> MediaPart:
    kind, field = part["type"], getattr(part, "field", "input")
    if kind == "input_file":
        return file_part(part, field, kind)
    if kind == "input_audio":
        return MediaPart(data_url(part[kind]["data"], "audio"), field, kind, "audio")
    return MediaPart(part["image_url"], field, kind, detail=part.get("detail", "auto"))


def _output(item: Item) -> Turn:
    return shown_texts(item["output"])


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest("input: an item is nested too deep", param="input") from None


def _own_call(arguments: Callable[[Item], str]) -> Callable[[Item], PromptCall]:
    """Return the conversion of named calls."""
    return lambda item: PromptCall(flat_name(item["name"], item.get("namespace")), arguments(item))


def _code_call(name: str) -> Callable[[Item], PromptCall]:
    return lambda item: PromptCall(name, _json({"code": item.get("code")}))


def _client_call(item: Item) -> PromptCall | None:
    name = TOOL_OF_CALL[item["type"]]
    return PromptCall(name, _json(CLIENT_TOOLS[name].arguments(item)))


def _search(item: Item) -> PromptCall | None:
    """Return the client's search; of one on OpenAI's servers, only the tools count."""
    return _client_call(item) if isinstance(item.get("call_id"), str) else None


def _found_tools(item: Item) -> str | None:
    if not isinstance(item.get("call_id"), str):
        return None
    return _json({"tools": list(read_tools([("tools", item["tools"])]).offered)})


def _texts_in(value: Any, key: str) -> str | None:
    """Return the texts under a key of a list's objects; None without a list."""
    if not isinstance(value, list):
        return None
    texts = (part.get(key) for part in value if isinstance(part, dict))
    return "\n".join(text for text in texts if isinstance(text, str))


def _mcp_result(item: Item) -> str | None:
    result = item.get("output")
    if not isinstance(result, str):
        result = None if item.get("error") is None else f"Error: {_json(item['error'])}"
    return result


def _agents_text(item: Item) -> str | None:
    text = _texts_in(item.get("content"), "text")
    author = item.get("author")
    return f"{author}: {text}" if text and isinstance(author, str) else text or None


_NOTHING = Kind("it")
KINDS: dict[str, Kind] = {
    "function_call": Kind(
        "fc",
        _texts("name", "call_id", empty=("arguments",)),
        _own_call(lambda item: str(item["arguments"])),
    ),
    "custom_tool_call": Kind(
        "ctc",
        _texts("name", "call_id", empty=("input",)),
        _own_call(lambda item: _json({INPUT: item["input"]})),
    ),
    "local_shell_call": Kind("lsh", _check_object("action"), _client_call),
    "shell_call": Kind("sh", _check_object("action"), _client_call),
    "apply_patch_call": Kind("apc", _check_object("operation"), _client_call),
    "tool_search_call": Kind("tsc", call=_search),
    "program": Kind("prog", _texts("call_id"), _code_call("program")),
    # ---- results of calls
    "function_call_output": Kind("fco", _check_output, result=_output),
    "custom_tool_call_output": Kind("ctco", _check_output, result=_output),
    "local_shell_call_output": Kind(
        "lsho", _texts(empty=("output",)), result=lambda i: str(i["output"])
    ),
    "shell_call_output": Kind("sho", _check_shell_output, result=lambda i: _json(i["output"])),
    "apply_patch_call_output": Kind(
        "apco",
        _texts("call_id"),
        result=lambda i: "\n".join(str(i[k]) for k in ("status", "output") if i.get(k)),
    ),
    "tool_search_output": Kind("tso", _check_tools, result=_found_tools, tools=True),
    "program_output": Kind("prgo", _texts("call_id"), result=lambda i: str(i.get("result") or "")),
    # ---- calls that another server ran, with their results, where those are texts
    "code_interpreter_call": Kind(
        "ci",
        call=_code_call("code_interpreter"),
        result=lambda i: _texts_in(i.get("outputs"), "logs"),
        elsewhere=True,
    ),
    "file_search_call": Kind(
        "fs",
        call=lambda i: PromptCall("file_search", _json({"queries": i.get("queries")})),
        result=lambda i: _texts_in(i.get("results"), "text"),
        elsewhere=True,
    ),
    "mcp_call": Kind(
        "mcp",
        _texts("name", "server_label", empty=("arguments",)),
        lambda i: PromptCall(flat_name(i["name"], i["server_label"]), str(i["arguments"])),
        _mcp_result,
        elsewhere=True,
    ),
    # ---- texts, and tools
    "agent_message": Kind("am", text=_agents_text),
    "additional_tools": Kind("at", _check_tools, tools=True),
    # ---- what the model is not shown: the next message says what came of it, or it is encrypted
    **dict.fromkeys(
        ("web_search_call", "image_generation_call", "mcp_list_tools", "mcp_approval_request",
         "mcp_approval_response", "compaction", "compaction_summary", "context_compaction",
         "configuration_update"),
        _NOTHING,
    ),
}  # fmt: skip
REFUSED = {
    "computer_call": "a text model sees no screenshots",
    "computer_call_output": "a text model sees no screenshots",
    "compaction_trigger": "this server compacts nothing; truncation can be auto",
}
"""Unreadable types of items → why."""


def check_item(item: Item, path: str) -> Kind:
    """Return the kind of a validated item other than a message or reasoning.

    Raises InvalidRequest with the faulty path.
    """
    kind = item.get("type")
    item_kind = KINDS.get(kind) if isinstance(kind, str) else None
    if item_kind is None:
        why = REFUSED.get(kind, "") if isinstance(kind, str) else ""
        raise InvalidRequest(
            f"{path}.type: {shown(kind)} items are not supported{why and f': {why}'}",
            param=f"{path}.type",
        )
    item_kind.check(item, path)
    return item_kind
