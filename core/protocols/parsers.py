"""The contracts of reasoning and tool parsers, and the events that they produce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

if TYPE_CHECKING:
    pass


class Content(msgspec.Struct, frozen=True, tag="content"):
    """Text of the content."""

    text: str


class CallText(Content, frozen=True, tag="call_text"):
    """A call's text, which a reasoning parser passes to the tool parser of its family. Without a
    tool parser it is not shown."""


class PlainText(Content, frozen=True, tag="plain_text"):
    """Text of the content that a reasoning parser knows to have no calls in it: a tool parser does
    not look for any there, even if the text quotes one."""


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    """Text of the reasoning."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, tag="tool_call_start"):
    """A tool call begins; its name is known."""

    index: int
    name: str
    id: str = ""
    """The model's own id for the call, if its format has one that the template requires back."""


class ToolCallArguments(msgspec.Struct, frozen=True, tag="tool_call_arguments"):
    """The next fragment of a call's arguments, as JSON text."""

    index: int
    fragment: str


class ToolCallEnd(msgspec.Struct, frozen=True, tag="tool_call_end"):
    """A tool call is complete."""

    index: int


ParserEvent: TypeAlias = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd
"""An event of a parser of model output, in the order of the text."""


class ReasoningParser(Protocol):
    """Separates reasoning from content, for one request. The fold of the events does not depend on
    how the text is cut into pieces.

    Never raises on any text. Takes linear time for any pieces: the cost of a piece does not depend
    on the length of the text before it. Events are `Content` and `Reasoning`.

    A class may have two more attributes. `markers: tuple[str, ...]`: texts that it searches for and
    that may be special tokens, which are then included in its input. `thinking_switch: tuple[str,
    bool]`: the chat template's argument that turns reasoning on or off, and the template's default;
    default ("enable_thinking", True).

    It may have a method `see_prompt_end(text: str) -> None`, called before `feed` with the last
    text of the prompt: some templates open the reasoning, or close it.

    It may have `template_options: tuple[str, ...]`: names of its own attributes that
    `chat_template_kwargs` may set to true or false. A class that has to see all special tokens says
    `keeps_special_tokens = True`. One whose format the checkpoint declares has a class method
    `for_checkpoint(folder: Path) -> type`, called at the start, that returns the class for this
    checkpoint; its ValueError ends the start.
    """

    reasoning_ended: bool
    """Return whether the reasoning has ended, or none will follow: the text after the text fed so
    far is content, and a grammar may constrain it. True as early as the text allows; once true, it
    stays true."""

    def __init__(self, *, thinking: bool = True) -> None:
        """`thinking`: whether the template enables reasoning for this request."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]: ...

    def finish(self) -> list[ParserEvent]: ...


class ArgumentForm(msgspec.Struct, frozen=True, kw_only=True):
    """The form of one argument of a call, if arguments are not one JSON object."""

    begin: str
    """`{key}` stands for the parameter's name."""
    end: str = ""
    between: str = ""
    plain: bool = False
    """Strings are written verbatim, up to `end`. Other values are JSON."""
    never: tuple[str, ...] = ()
    """Texts that such a string cannot contain, besides `end`."""
    named: Mapping[str, str] = {}
    """Other spellings of constants: JSON text → the family's text."""


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """The form of a family's calls, for grammars: open, call, between, call, …, close; each call is
    begin, arguments, end. Texts that are special tokens of the tokenizer stand for those tokens.

    An output is constrained to free text until `trigger`, then calls, then the end.
    """

    trigger: str
    """A beginning of `open` that free text may not contain: once it is written, calls follow."""
    open: str
    begin: str
    """`{name}` stands for the tool's name, `{number}` for a number that the model chooses."""
    end: str
    between: str
    """Text between a call and the next one, including the beginning of that."""
    close: str = ""
    quoted: bool = True
    """Whether the name is written inside JSON quotes; otherwise verbatim: letters, digits, `_`,
    `-`, `.`"""
    arguments: ArgumentForm | None = None
    """None: a JSON object."""
    never: tuple[str, ...] = ()
    """Other texts that the parser takes for the beginning of a call: free text may not contain
    them."""
    never_pattern: str = ""
    """The same, as a regular expression."""
    never_first: str = ""
    """A regular expression for beginnings of calls at the start of a text: free text may not start
    with them."""
    only_first: bool = False
    """Whether calls are allowed only at the start of the content."""


class ToolParser(Protocol):
    """Finds tool calls in the content, for one request. Rules as for `ReasoningParser`.

    Events are `Content`, `ToolCallStart`, `ToolCallArguments`, `ToolCallEnd`. Calls are numbered
    from 0 and do not overlap; only a call with valid JSON for arguments has an end: an object by
    RFC 8259, without NaN, Infinity or control characters within strings.

    A class may have `markers`, `keeps_special_tokens` and `for_checkpoint`, as reasoning parsers
    have, and a function `new_id() -> str`: an id for a call whose text has none, if the family's
    template requires a certain form. `needs_reasoning_parser: str` names the reasoning parser
    without which it cannot be used. With `reads_plain_text = True` it gets `PlainText`, too.

    It may have `call_form: CallForm | tuple[CallForm, ...]`, too: the form of its family's calls.
    With it, required calls, and those of tools marked `strict`, are constrained to their schemas by
    a grammar in the family's own form. Without it, required calls are plain JSON, and `strict` is
    refused.
    """

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools`: the request's tools in OpenAI's form, for typing arguments."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]: ...

    def finish(self) -> list[ParserEvent]: ...
