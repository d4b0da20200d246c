"""Reasoning and content by the checkpoint's own response template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from ...core.output_parsing.events import merge_events
from ...core.protocols.parsers import CallText, Content, ParserEvent, PlainText, Reasoning
from ..parsing.regex_search import Pattern, Search, pattern_set
from ..parsing.regions import RegionReader
from ..parsing.response_template import ALL_CONTENT, Field, ResponseTemplate, template_of

MAX_LEAD = 256
"""Most characters dropped before the first region if a template has no field for them; more is
content."""


class HfReasoning:
    """Regions as the `response_template` in the checkpoint's tokenizer_config.json says; those of
    calls are for the tool parser `hf`.
    """

    template: ClassVar[ResponseTemplate] = ALL_CONTENT
    markers: ClassVar[tuple[str, ...]] = ()
    keeps_special_tokens = True

    @classmethod
    def for_checkpoint(cls, folder: Path) -> type[HfReasoning]:
        template = template_of(folder)
        return type(cls.__name__, (cls,), {"template": template, "markers": template.markers})

    def __init__(self, *, thinking: bool = True) -> None:
        template = self.template
        self.reasoning_ended = not thinking or not any(f.is_reasoning for f in template.fields)
        """Whether content or a call has begun, or begins next; stays true."""
        self._events: list[ParserEvent] = []
        self._writers = {
            field.name: _TextWriter(field, self._think if field.is_reasoning else self._answer)
            for field in template.fields
        }
        self._lead: list[str] | None = None if template.rest else []
        """Text before the first region; None: it is content or dropped."""
        self._shows_rest = False
        """Whether text without a field is content, as no region has come."""
        self._reader = RegionReader(template.fields, self)

    def see_prompt_end(self, text: str) -> None:
        begin = _end_of_last(self.template.anchor, text)
        if begin is not None:
            self._reader.feed(text[begin:])
            self._events.clear()
            if self._lead:
                self._lead.clear()

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        self._reader.feed(text)
        return self._take_events()

    def finish(self) -> list[ParserEvent]:
        self._reader.finish()
        self._emit("".join(self._lead or ()))
        return self._take_events()

    def open_region(self, field: Field, mark: str, groups: Mapping[str, str]) -> None:
        if self.template.rest is not None:
            self._writers[self.template.rest.name].end()
        self._lead, self._shows_rest = None, False
        if not field.is_reasoning:
            self.reasoning_ended = True
        if field.body is not None:
            self._pass_on(mark)

    def add_text(self, field: Field | None, text: str) -> None:
        if field is None:
            self._add_outside(text)
        elif field.body is not None:
            self._pass_on(text)
        else:
            self._writers[field.name].add(text)

    def closing(self, field: Field) -> None:
        if field.is_reasoning and self.template.rest is not None:
            self.reasoning_ended = True

    def close_region(self, field: Field, mark: str | None, groups: Mapping[str, str]) -> None:
        self._writers[field.name].end()
        if field.body is not None:
            self._pass_on(mark or "")
        if mark is not None:
            self.closing(field)

    def _add_outside(self, text: str) -> None:
        if self._lead is not None:
            self._lead.append(text)
            if sum(map(len, self._lead)) <= MAX_LEAD:
                return
            text, self._lead, self._shows_rest = "".join(self._lead), None, True
        if self._shows_rest:
            self._emit(text)

    def _think(self, text: str) -> None:
        self._events.append(Reasoning(text))

    def _answer(self, text: str) -> None:
        self.reasoning_ended = True
        self._events.append(PlainText(text))

    def _emit(self, text: str) -> None:
        if text:
            self.reasoning_ended = True
            self._events.append(Content(text))

    def _pass_on(self, text: str) -> None:
        if text:
            self._events.append(CallText(text))

    def _take_events(self) -> list[ParserEvent]:
        events = merge_events(self._events[:])
        self._events.clear()
        return events


class _TextWriter:
    def __init__(self, field: Field, emit: Callable[[str], None]) -> None:
        self._strip, self._join, self._emit = field.strip, field.join, emit
        self._written = self._inside = False
        """Whether there was text, at all and in this region."""
        self._space: list[str] = []
        """Whitespace that is dropped at a region's end."""

    def add(self, text: str) -> None:
        if self._strip:
            if not self._inside:
                text = text.lstrip()
            bare = text.rstrip()
            after, text = text[len(bare) :], bare
            if text:
                text = "".join([*self._space, text])
                self._space.clear()
            self._space += [after] if after else []
        if not text:
            return
        self._emit(self._join + text if self._written and not self._inside else text)
        self._written = self._inside = True

    def end(self) -> None:
        self._space.clear()
        self._inside = False


def _end_of_last(anchor: Pattern, text: str) -> int | None:
    """Return where the last match ends, or None."""
    end, search = None, Search(pattern_set(anchor))
    while True:
        match = search.read(text, 0) or search.finish()
        if match is None:
            return end
        end, search = match.end, Search(pattern_set(anchor), match.end)
