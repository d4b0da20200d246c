"""Tool calls whose name stands in marks, before a JSON object that is the arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .cursor import SPACES, Marks, Read
from .tool_machine import ToolMachine, closing

_MAX_HEADER = 256
"""Characters of what stands before the arguments; what is longer is no call."""


class NamedForm:
    """How one call is written: open, before_name, name, name_end, fence, {arguments}, close."""

    def __init__(
        self,
        *,
        open: Sequence[str],
        name_end: Sequence[str],
        close: Sequence[str] = (),
        before_name: str = "",
        fence: str = "",
    ) -> None:
        """`before_name` and `fence` may be missing. A `name_end` of `{` begins the arguments."""
        self.open, self.close = tuple(open), tuple(close)
        self.before_name, self.name_end = Marks(before_name), Marks(*name_end)
        self.fence, self.end = Marks(fence), Marks(*close)
        self.close_or_open = Marks(*close, *open)

    def name_of(self, header: str) -> tuple[str, str]:
        """→ (name, the call's id or "") of what stands for the name."""
        return header.strip(), ""


class NamedCallsParser(ToolMachine):
    """Reads calls of one form. A missing closing mark is tolerated, and missing arguments are."""

    form: ClassVar[NamedForm]
    around: ClassVar[tuple[str, ...]] = ()
    """Marks around all calls; they are dropped."""

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._marks = Marks(*self.around, *self.form.open)
        super().__init__(tools=tools)

    def read(self) -> Read[None]:
        """Content and calls in turn."""
        while mark := (yield from self.text.until(self._marks, self.answer.say)):
            if mark not in self.around:
                yield from named_call(self, self.form, [mark])


def named_call(parser: ToolMachine, form: NamedForm, source: list[str]) -> Read[None]:
    """Read one call after its opening mark, which is in `source`."""
    text, answer = parser.text, parser.answer
    source.append((yield from text.run(SPACES)))
    source.append((yield from text.accept(form.before_name)))
    header = yield from text.until_within(form.name_end, _MAX_HEADER)
    name = ""
    if header is not None:
        name, id = form.name_of(header[0])
        source += header
    if not name or any(char.isspace() for char in name):
        answer.say("".join(source))
        return
    if source[-1] == "{":
        text.back(source.pop())
    source.append((yield from text.run(SPACES)))
    source.append((yield from text.accept(form.fence)))
    source.append((yield from text.run(SPACES)))
    if (yield from text.peek()) == "{":
        answer.start(name, id)
        if (yield from text.json(_nowhere, answer.arguments)) != "done":
            return
    elif (yield from text.accept(form.end)):
        answer.start(name, id)
        answer.arguments("{}")
        answer.end()
        return
    else:
        answer.say("".join(source))
        return
    answer.end()
    yield from closing(text, answer, form.close, form.close_or_open)


def _nowhere(text: str) -> None:
    """Drop it."""
