"""Tool calls by the checkpoint's own response template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...core.output_parsing.events import merge_events
from ...core.protocols.parsers import ParserEvent
from ..parsing.regions import RegionReader
from ..parsing.response_template import ALL_CONTENT, Field, ResponseTemplate, template_of
from ..parsing.template_forms import ScalarForm
from ..parsing.template_values import Body, arguments_json, calls_of
from ..parsing.tool_machine import Answer, schemas


class HfToolParser:
    """Regions of calls as the `response_template` in the checkpoint's tokenizer_config.json says. A
    region that is not read as calls is content.

    Use it with the reasoning parser `hf`, which reads the other regions.
    """

    template: ClassVar[ResponseTemplate] = ALL_CONTENT
    markers: ClassVar[tuple[str, ...]] = ()
    keeps_special_tokens = True
    needs_reasoning_parser = "hf"

    @classmethod
    def for_checkpoint(cls, folder: Path) -> type[HfToolParser]:
        template = template_of(folder)
        if template.calls is None:
            raise ValueError("response_template.fields.tool_calls: is missing")
        return type(cls.__name__, (cls,), {"template": template, "markers": template.markers})

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._schemas = schemas(tools)
        self._events: list[ParserEvent] = []
        self._answer = Answer(self._events)
        self._source: list[str] = []
        """The region's text, with marks."""
        self._groups: Mapping[str, str] = {}
        """Group names of the opening mark → texts."""
        self._body: Body | None = None
        """None: unreadable."""
        calls = self.template.calls
        self._reader = RegionReader(() if calls is None else (calls,), self)

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        self._reader.feed(text)
        events = merge_events(self._events[:])
        self._events.clear()
        return events

    def finish(self) -> list[ParserEvent]:
        self._reader.finish()
        return self._answer.finish()

    def open_region(self, field: Field, mark: str, groups: Mapping[str, str]) -> None:
        self._source, self._groups = [mark], groups
        self._body = Body(field.body or ScalarForm())

    def add_text(self, field: Field | None, text: str) -> None:
        if field is None:
            self._answer.emit(text)
            return
        self._source.append(text)
        if self._body is not None:
            try:
                self._body.add(text)
            except ValueError:
                self._body = None

    def closing(self, field: Field) -> None:
        """The region is read at its end."""

    def close_region(self, field: Field, mark: str | None, groups: Mapping[str, str]) -> None:
        self._source.append(mark or "")
        calls: list[tuple[str, str]] = []
        if self._body is not None and (mark is not None or field.close is None):
            try:
                calls = self._calls(self._body, field, {**self._groups, **groups})
            except ValueError:
                calls = []
        if not calls:
            self._answer.emit("".join(self._source))
        for name, arguments in calls:
            self._answer.start(name)
            self._answer.arguments(arguments)
            self._answer.end()
        self._source, self._body = [], None

    def _calls(self, body: Body, field: Field, groups: Mapping[str, str]) -> list[tuple[str, str]]:
        return [
            (name, arguments_json(arguments, self._schemas.get(name)))
            for name, arguments in calls_of(body.value(), field.shape, groups)
        ]
