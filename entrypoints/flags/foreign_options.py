"""Command lines of other servers: what each of their options becomes here.

An option of another server has one of these states: `same` (an option of the parser), `equivalent`
(other words of this command line), `no effect` (taken, with the reason why it is unnecessary), or
`refused` (with what to use). Dotted options of JSON values, `--x.a.b 1`, become `--x '{"a": {"b":
1}}'` first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from .values import json_value, scaled_number

State = Literal["same", "equivalent", "no effect", "refused", "unknown"]
ANY = "*"
"""Number of values: those before the next option."""


class Refused(Exception):
    """The value of an option is refused, for this reason."""


class Unneeded(Exception):
    """The value of an option changes nothing, for this reason."""


class Option(NamedTuple):
    """An option of another server, or one of the parser with values of another server."""

    state: State
    text: str
    """The equivalent words, or the reason."""
    nargs: int | str = 1
    words: Callable[[list[str]], Sequence[str]] | None = None
    """Returns this command line's words for the values. Raises Refused and Unneeded."""
    neutral: frozenset[str] = frozenset()
    """Values of a refused option that change nothing here."""


class Line(NamedTuple):
    given: tuple[str, ...]
    words: tuple[str, ...]
    state: State
    note: str = ""

    @property
    def flag(self) -> str:
        name = self.given[0].partition("=")[0]
        return "-O" if name.startswith("-O") else name


class Options(Protocol):
    """The part of a Parser that is read here."""

    other_options: Mapping[str, Option]
    _option_string_actions: dict[str, argparse.Action]


class _Occurrence(NamedTuple):
    flag: str
    """As the parser spells it; "" for words that belong to no option."""
    values: list[str]
    given: tuple[str, ...]
    joined: bool = False
    """Whether flag and value are one word."""


def translated(parser: Options, words: Iterable[str]) -> list[Line]:
    """Return what the words become, in order."""
    return [_line(parser, each) for each in _folded(parser, _read(parser, iter(words)))]


def command_line(parser: Options, lines: Iterable[Line]) -> list[str]:
    """Return the words of all lines, with the parts of a JSON value joined."""
    words = iter([word for line in lines for word in line.words])
    return [word for each in _folded(parser, _read(parser, words)) for word in _own_words(each)]


def option_of(parser: Options, flag: str) -> tuple[State, str]:
    """Return the state of an option by its name, and its equivalent or reason."""
    if (other := parser.other_options.get(flag)) is not None:
        return other.state, other.text
    if flag in parser._option_string_actions:
        return "same", ""
    if (opposite := _opposite(parser, flag)) is not None:
        return opposite.state, opposite.text
    return "unknown", ""


def json_words(flag: str, value: Any) -> list[str]:
    return [f"{flag}={json.dumps(value, separators=(',', ':'))}"]


# ---------------------------------------------------------------- reading


def _read(parser: Options, words: Iterator[str]) -> Iterator[_Occurrence]:
    pending: list[str] = []
    while True:
        word = pending.pop() if pending else next(words, None)
        if word is None:
            return
        if word == "--":
            yield _Occurrence("", [], (word, *words))
            return
        if not word.startswith("-") or word == "-":
            yield _Occurrence("", [], (word,))
            continue
        name, equals, value = word.partition("=")
        if name.startswith("-O") and len(name) > 2 and "-O" in parser.other_options:  # -O3
            yield _Occurrence("-O", [name[2:]], (word,), joined=True)
            continue
        flag = spelled(parser, name)
        if equals:
            yield _Occurrence(flag, [value], (word,), joined=True)
            continue
        nargs = _nargs(parser, flag)
        values: list[str] = []
        while nargs != 0 and (nargs in ("+", ANY) or not values):
            follower = next(words, None)
            if follower is None:
                break
            if nargs == 1 and follower != "--" and not _is_flag(parser, follower):
                values.append(follower)
            elif nargs != 1 and (not follower.startswith("-") or _is_number(follower)):
                values.append(follower)
            else:
                pending.append(follower)
                break
        yield _Occurrence(flag, values, (word, *values))


def spelled(parser: Options, name: str) -> str:
    """Return an option's name as it is known, with - for _; a dotted one's up to the first dot.
    Unknown names are returned as they are.
    """
    if not name.startswith("--"):
        return name
    head, dot, keys = name.partition(".")
    head = head.replace("_", "-")
    for known, whole in ((name.replace("_", "-"),) * 2, (head, f"{head}{dot}{keys}")):
        if option_of(parser, known)[0] != "unknown":
            return whole
    return name


def _nargs(parser: Options, flag: str) -> int | str:
    if (other := parser.other_options.get(flag)) is not None:
        return other.nargs
    if (action := parser._option_string_actions.get(flag)) is not None:
        return 1 if action.nargs is None else action.nargs
    if "." in flag:
        return 1
    if (opposite := _opposite(parser, flag)) is not None:
        return opposite.nargs
    return 0


def _is_flag(parser: Options, word: str) -> bool:
    return word.startswith("-") and option_of(
        parser, spelled(parser, word.partition("=")[0])
    )[0] != "unknown"  # fmt: skip


def _is_number(word: str) -> bool:
    return word[1:].replace(".", "", 1).isdigit()


# ---------------------------------------------------------------- dotted options


def _folded(parser: Options, given: Iterable[_Occurrence]) -> list[_Occurrence]:
    """Join `--x.a 1`, `--x.b 2` and `--x '{...}'` of each option that takes JSON."""
    occurrences = list(given)
    dotted = {_dotted_flag(parser, each) for each in occurrences} - {None}
    found: list[_Occurrence] = []
    places: dict[str, int] = {}
    wholes: dict[str, dict[str, Any]] = {}
    parts: dict[str, dict[str, Any]] = {}
    for each in occurrences:
        if (flag := _dotted_flag(parser, each)) is not None:
            value = _nested(each.flag.partition(".")[2], each.values[0])
            parts[flag] = _merged(parts.get(flag, {}), value)
        elif (flag := _first_name(parser, each.flag)) in dotted and each.values:
            value = _parsed(each.values[0])
            if not isinstance(value, dict):
                found.append(each)
                continue
            wholes[flag] = value
        else:
            found.append(each)
            continue
        place = places.setdefault(flag, len(found))
        if place == len(found):
            found.append(_Occurrence(flag, [], (), joined=True))
        found[place] = found[place]._replace(given=(*found[place].given, *each.given))
    for flag, place in places.items():
        value = _merged(wholes.get(flag, {}), parts.get(flag, {}))
        found[place] = found[place]._replace(values=[json.dumps(value)])
    return found


def _dotted_flag(parser: Options, each: _Occurrence) -> str | None:
    """Return `--x` of `--x.a.b 1`, if it takes JSON, and `--x.a.b` is no option itself."""
    head, _, keys = each.flag.partition(".")
    flag = _first_name(parser, head)
    is_own = each.flag in parser._option_string_actions
    return flag if keys and each.values and not is_own and _takes_json(parser, flag) else None


def _first_name(parser: Options, flag: str) -> str:
    """Return the long name of `flag`."""
    other = parser.other_options.get(flag)
    action = parser._option_string_actions.get(flag)
    if other is not None or action is None:
        return flag
    return next((name for name in action.option_strings if name.startswith("--")), flag)


def _takes_json(parser: Options, flag: str) -> bool:
    if (action := parser._option_string_actions.get(flag)) is not None:
        return action.type is json_value
    other = parser.other_options.get(flag)
    return other is not None and other.nargs != 0


def _nested(keys: str, text: str) -> Any:
    value = _parsed(text)
    if keys.endswith("+"):
        keys, value = keys[:-1], [_parsed(item) for item in text.split(",")]
    for key in reversed(keys.split(".")):
        value = {key: value}
    return value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return scaled_number(text)
    except argparse.ArgumentTypeError:
        return text


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    whole = dict(first)
    for key, value in second.items():
        before = whole.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            whole[key] = _merged(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            whole[key] = before + value
        else:
            whole[key] = value
    return whole


# ---------------------------------------------------------------- translating


def _line(parser: Options, each: _Occurrence) -> Line:
    flag = each.flag
    own = parser._option_string_actions.get(flag)
    other = parser.other_options.get(flag)
    if other is None and own is None:
        other = _opposite(parser, flag)
    if other is None or not flag:
        state: State = "same" if own is not None or not flag else "unknown"
        return Line(each.given, _own_words(each), state)
    if other.state == "no effect":
        return Line(each.given, (), "no effect", other.text)
    if other.state == "refused":
        values = {value.strip().lower() for value in each.values}
        if values and values <= other.neutral:
            return Line(each.given, (), "no effect", "this is how it is here")
        return Line(each.given, (), "refused", other.text)
    if not each.values and other.nargs in (1, "+"):
        return Line(each.given, (), "refused", "expected a value")
    try:
        words = tuple(other.words(each.values) if other.words is not None else (other.text,))
    except Refused as error:
        return Line(each.given, (), "refused", str(error))
    except Unneeded as error:
        return Line(each.given, (), "no effect", str(error))
    if own is not None and words == (f"{flag}={each.values[0]}",):
        return Line(each.given, _own_words(each), "same")
    return Line(each.given, words, "equivalent")


def _own_words(each: _Occurrence) -> tuple[str, ...]:
    if not each.flag:
        return each.given
    if each.joined:
        return (f"{each.flag}={each.values[0]}",)
    return (each.flag, *each.values)


def _opposite(parser: Options, flag: str) -> Option | None:
    """Return what `--no-x` and `--disable-x` are where only `--x` and `--enable-x` are known, and
    `--enable-x` where only `--disable-x` is.
    """
    own = parser._option_string_actions
    for prefix, others in (
        ("--no-", ("--",)), ("--disable-", ("--enable-",)), ("--enable-", ("--disable-",)),
    ):  # fmt: skip
        if not flag.startswith(prefix):
            continue
        for start in others:
            positive = start + flag.removeprefix(prefix)
            negative = positive.replace("--", "--no-", 1)
            if prefix != "--no-" and negative in own:
                return Option("equivalent", negative, 0)
            if positive in own and own[positive].nargs == 0 and negative not in own:
                return Option("no effect", f"this is so unless {positive} is given", 0)
            option = parser.other_options.get(positive)
            if option is not None and option.nargs in (0, ANY):
                why = option.text if option.state == "no effect" else "this is how it is here"
                return Option("no effect", why, 0)
    return None
