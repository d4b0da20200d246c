"""Structural tags as Lark grammars with llguidance's additions: schemas, lazy text, tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.grammars.spec import tag_formats

_ANY = r"(.|\n)*"
_LITERAL = re.compile(r"[\\^$.|?*+()\[\]{}]")
_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)


def lark_of(
    format: Mapping[str, Any], special_tokens: Mapping[str, int], options: Mapping[str, Any]
) -> str:
    """Return a grammar for a tag's `format`, which must have no `unread` part.

    Special tokens in constant texts become special tokens of the grammar. options: llguidance's,
    for JSON schemas. Raises ValueError with the format's fault.
    """
    writer = _Writer(special_tokens, options)
    start = writer.expression(format, "format")
    return "\n".join([f"start: {start or writer.nothing()}", *writer.rules])


_READ = {
    "const_string": {"value"},
    "json_schema": {"json_schema", "style", "max_whitespace_cnt"},
    "regex": {"pattern", "excludes", "never", "never_first"},
    "any_text": {"excludes", "never", "never_first"},
    "sequence": {"elements"},
    "or": {"elements"},
    "optional": {"content"},
    "star": {"content"},
    "plus": {"content"},
    "tag": {"begin", "content", "end"},
    "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
    "triggered_tags": {
        "triggers", "tags", "at_least_one", "stop_after_first", "excludes", "never", "never_first",
    },
}  # fmt: skip


def unread(format: Mapping[str, Any]) -> str | None:
    """Return the first unsupported part of a format."""
    for part in tag_formats({"format": format}):
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in _READ:
            return f"no format of this backend's: {kind!r}"
        if others := sorted(part.keys() - _READ[kind] - {"type"}):
            return f"{kind}: {others[0]} is not supported"
        if part.get("style", "json") != "json":
            return f"json_schema: style {part['style']!r} is not supported"
        if kind == "tag" and not (isinstance(part.get("begin"), str) and "end" in part):
            return "tag: begin and end must be texts"
        if kind == "tag" and not isinstance(part["end"], str):
            return "tag: begin and end must be texts"
    return None


class _Writer:
    def __init__(self, special_tokens: Mapping[str, int], options: Mapping[str, Any]) -> None:
        self._special = special_tokens
        texts = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._options = options
        self.rules: list[str] = []

    def expression(self, format: Any, path: str) -> str:
        """Return a rule's expression for the format; "" if it is empty."""
        kind = format.get("type") if isinstance(format, Mapping) else None
        try:
            return str(getattr(self, f"write_{kind}")(format, path))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: {kind} needs {error}") from None

    def nothing(self) -> str:
        """Return an expression of the empty text."""
        return '""'

    # ------------------------------------------------------------ leaves

    def write_const_string(self, format: Mapping[str, Any], path: str) -> str:
        return self._text(format["value"])

    def write_json_schema(self, format: Mapping[str, Any], path: str) -> str:
        schema = format["json_schema"]
        if schema is False or not isinstance(schema, Mapping | bool):
            raise ValueError(f"{path}.json_schema: must be a schema")
        document = {**(schema if isinstance(schema, Mapping) else {}), "x-guidance": self._options}
        return self._rule(f"%json {json.dumps(document)}")

    def write_regex(self, format: Mapping[str, Any], path: str) -> str:
        return self._terminal(_Free(format, format["pattern"]))

    def write_any_text(self, format: Mapping[str, Any], path: str) -> str:
        return self._terminal(_Free(format))

    # ------------------------------------------------------------ combinations

    def write_sequence(self, format: Mapping[str, Any], path: str) -> str:
        parts = [
            self.expression(element, f"{path}.elements[{index}]")
            for index, element in enumerate(format["elements"])
        ]
        return " ".join(filter(None, parts))

    def write_or(self, format: Mapping[str, Any], path: str) -> str:
        return self._either(
            [
                self.expression(element, f"{path}.elements[{index}]")
                for index, element in enumerate(format["elements"])
            ]
        )

    def write_optional(self, format: Mapping[str, Any], path: str) -> str:
        return self._either([self.expression(format["content"], f"{path}.content"), ""])

    def write_star(self, format: Mapping[str, Any], path: str) -> str:
        return f"({self._content(format, path)})*"

    def write_plus(self, format: Mapping[str, Any], path: str) -> str:
        return f"({self._content(format, path)})+"

    def write_tag(self, format: Mapping[str, Any], path: str, cut: int = 0) -> str:
        """Write a tag. `cut`: number of characters of `begin` already written."""
        content, end = format["content"], format["end"]
        begin = self._text(format["begin"][cut:])
        if content.get("type") in ("any_text", "regex") and end:
            # Text and its end in one lazy lexeme: a greedy one would run over the end's beginning.
            body = self._until(_Free(content, content.get("pattern", _ANY)), end)
        else:
            body = f"{self.expression(content, f'{path}.content')} {self._text(end)}".strip()
        return f"{begin} {body}".strip()

    def write_tags_with_separator(self, format: Mapping[str, Any], path: str) -> str:
        tags = [
            self.write_tag(tag, f"{path}.tags[{index}]") for index, tag in enumerate(format["tags"])
        ]
        item = self._rule(self._either(tags))
        text = item
        if not format.get("stop_after_first"):
            text = f"{item} ({self._text(format['separator'])} {item})*"
        return text if format.get("at_least_one") else f"({text})?"

    def write_triggered_tags(self, format: Mapping[str, Any], path: str) -> str:
        tags = self._by_trigger(format, path)
        more = ""
        if not format.get("stop_after_first"):
            later = self._after_text(tags, _Free(format))
            more = f" ({later})* {self._terminal(_Free(format))}"
        if format.get("at_least_one"):
            openings = [f"{self._text(trigger)} {body}" for trigger, body in tags]
            return f"{self._rule(self._either(openings))}{more}"
        at_start = _Free(format, at_start=True)
        first = self._after_text(tags, at_start)
        return f"({first}{more} | {self._terminal(at_start)})"

    def _by_trigger(self, format: Mapping[str, Any], path: str) -> list[tuple[str, str]]:
        """Return (trigger, text that follows it) for each tag."""
        pairs: list[tuple[str, str]] = []
        for index, tag in enumerate(format["tags"]):
            triggers = [t for t in format["triggers"] if t and tag["begin"].startswith(t)]
            if len(triggers) != 1:
                raise ValueError(
                    f"{path}.tags[{index}].begin: must start with exactly one of the triggers"
                )
            pairs.append(
                (triggers[0], self.write_tag(tag, f"{path}.tags[{index}]", len(triggers[0])))
            )
        if not pairs:
            raise ValueError(f"{path}: triggers and tags must not be empty")
        return pairs

    def _after_text(self, tags: Sequence[tuple[str, str]], free: _Free) -> str:
        ways: dict[str, list[str]] = {}
        for trigger, body in tags:
            ways.setdefault(trigger, []).append(body)
        return self._rule(
            self._either(
                [
                    f"{opening} ({self._either(bodies)})"
                    for trigger, bodies in ways.items()
                    for opening in self._openings(free, trigger)
                ]
            )
        )

    def _openings(self, free: _Free, trigger: str) -> list[str]:
        """Return free text followed by the trigger, as text and, if it is one, as a token."""
        ways = [self._lazy(free, trigger)]
        if self._tokens.search(trigger):
            ways.append(f"{self._terminal(free)} {self._text(trigger)}")
        return ways

    # ------------------------------------------------------------ rules

    def _content(self, format: Mapping[str, Any], path: str) -> str:
        return self.expression(format["content"], f"{path}.content") or self.nothing()

    def _either(self, ways: Sequence[str]) -> str:
        some = list(dict.fromkeys(filter(None, ways)))
        if not some:
            return ""
        text = some[0] if len(ways) == 1 else f"({' | '.join(some)})"
        return text if all(ways) else f"({text})?"

    def _rule(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body or self.nothing()}")
        return name

    def _terminal(self, free: _Free) -> str:
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {free.terminal()}")
        return name

    def _until(self, free: _Free, end: str) -> str:
        """Return free text and the end text."""
        special = self._tokens.search(end)
        if special is None:
            return self._lazy(free, end)
        if special.start():
            return (
                f"{self._lazy(free, end[: special.start()])} {self._text(end[special.start() :])}"
            )
        return f"{self._terminal(free)} {self._text(end)}"

    def _lazy(self, free: _Free, end: str) -> str:
        terminal = self._terminal(free)
        name = f"lazy{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {terminal} {json.dumps(end, ensure_ascii=False)}")
        return name

    def _text(self, text: Any) -> str:
        if not isinstance(text, str):
            raise ValueError(f"{text!r} must be a text")
        parts: list[str] = []
        at = 0
        for match in self._tokens.finditer(text):
            parts += [_quoted(text[at : match.start()]), f"<[{self._special[match[0]]}]>"]
            at = match.end()
        return " ".join(filter(None, [*parts, _quoted(text[at:])]))


class _Free:
    def __init__(
        self, format: Mapping[str, Any], pattern: str = _ANY, *, at_start: bool = False
    ) -> None:
        """`at_start`: whether the output begins with it."""
        self._pattern = pattern
        self._not = [f"{_ANY}{_escaped(text)}{_ANY}" for text in format.get("excludes", ()) if text]
        if format.get("never"):
            self._not.append(f"{_ANY}({format['never']}){_ANY}")
        if format.get("never_first") and (at_start or format.get("type") == "any_text"):
            self._not.append(f"({format['never_first']}){_ANY}")

    def terminal(self) -> str:
        return " & ".join([_regex(self._pattern), *(f"~{_regex(name)}" for name in self._not)])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escaped(text: str) -> str:
    return _LITERAL.sub(lambda match: "\\" + match[0], text)


def _regex(pattern: str) -> str:
    def mend(match: re.Match[str]) -> str:
        return {"/": "\\/", "\n": "\\n"}.get(match[0], match[0])

    return f"/{_SLASH.sub(mend, pattern)}/"
