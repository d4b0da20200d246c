"""Tool calls with the name in marks, before a JSON object with the arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .cursor import SPACES, EmitText, Marks, Read
from .tool_machine import ToolMachine, closing, rest_of_call

_MAX_HEADER = 256
"""Most characters before the arguments; longer text is not a call."""


class NamedForm:
    """The form of one call: open, before_name, name, name_end, fence, {arguments}, close.

    Arguments that are not an object break the call off.
    """

    def __init__(
        self,
        *,
        open: Sequence[str],
        name_end: Sequence[str],
        close: Sequence[str] = (),
        before_name: str = "",
        fence: str = "",
        fence_end: str = "",
        around: Sequence[str] = (),
        name_alone: bool = False,
    ) -> None:
        """`before_name` and the fences are optional in the text. A `name_end` of `{` begins the
        arguments. `around`: marks around all calls. `name_alone`: a name up to another call or the
        end is a call without arguments.
        """
        self.open, self.close = tuple(open), tuple(close)
        self.before_name, self.name_end = Marks(before_name), Marks(*name_end)
        self.fence, self.end = Marks(fence), Marks(*close)
        self.close_or_open = Marks(*close, *open)
        self.any = Marks(*close, *open, *around)
        self.ends = Marks(*close, *(fence_end + mark for mark in close), *open, *around)
        """Texts that end a call, even with incomplete JSON."""
        self.name_alone = name_alone
        self.header_end = Marks(*name_end, *(open if name_alone else ()))

    def name_of(self, header: str) -> tuple[str, str]:
        """Return (name, the call's id or "") from the text at the name's place."""
        return header.strip(), ""


class NamedCallsParser(ToolMachine):
    """Reads calls of one form; the closing mark and the arguments are optional."""

    form: ClassVar[NamedForm]
    around: ClassVar[tuple[str, ...]] = ()
    """Dropped marks around all calls."""
    last: ClassVar[str] = ""
    """One of them after which content is dropped, but not calls."""

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._marks = Marks(*self.around, *self.form.open)
        super().__init__(tools=tools)

    def read(self) -> Read[None]:
        emit: EmitText = self.answer.emit
        while mark := (yield from self.text.until(self._marks, emit)):
            if mark not in self.around:
                yield from named_call(self, self.form, [mark])
            elif mark == self.last and self.answer.calls:
                emit = _discard


def named_call(parser: ToolMachine, form: NamedForm, source: list[str]) -> Read[None]:
    """Read a call after its opening mark, which is in `source`."""
    text, answer = parser.text, parser.answer
    source.append((yield from text.run(SPACES)))
    source.append((yield from text.accept(form.before_name)))
    header = yield from text.until_within(form.header_end, _MAX_HEADER)
    if header is None and form.name_alone and text.over and len(text.rest()) <= _MAX_HEADER:
        header = text.rest(), ""
        text.skip(len(header[0]))
    name = ""
    if header is not None:
        name, id = form.name_of(header[0])
        source += header
    alone = header is not None and header[1] in ("", *form.open)
    if not name or any(char.isspace() for char in name) or (alone and not parser.known(name)):
        if alone:
            text.back(source.pop())
        answer.emit("".join(source))
        return
    if alone:
        text.back(source.pop())
        answer.start(name, id)
        answer.arguments("{}")
        answer.end()
        return
    if source[-1] == "{":
        text.back(source.pop())
    source.append((yield from text.run(SPACES)))
    source.append((yield from text.accept(form.fence)))
    source.append((yield from text.run(SPACES)))
    answer.start(name, id)
    if (yield from text.accept(form.end)):
        answer.arguments("{}")
        answer.end()
        return
    status = "bad"
    if (yield from text.peek()) == "{":
        status = yield from text.json(_discard, answer.arguments, form.ends)
    if status != "done":
        yield from rest_of_call(text, form.close, form.any)
        return
    answer.end()
    yield from closing(text, answer, form.close, form.close_or_open)


def _discard(text: str) -> None:
    """Drop the text."""
