"""Reads what a pickle describes as data: no name in it is looked up, and nothing is called.

A pickle is a program for a small stack machine. This runs the instructions that build lists,
tuples, mappings, numbers, texts and bytes; a call that it describes becomes a `Call`, with what
would be called and its arguments. All others are refused.
"""

from __future__ import annotations

import dataclasses
import pickletools
from collections.abc import Callable, Set
from typing import Any, NamedTuple, TypeAlias

Stack: TypeAlias = list[Any]
MAX_INSTRUCTIONS = 1 << 20
"""Most of a pickle. Each takes about a microsecond; the handle of a tensor has about 60."""


class Name(NamedTuple):
    """Something in a module, which is not looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclasses.dataclass(eq=False)
class Call:
    """A call, which is not made."""

    name: Name
    args: tuple[Any, ...]
    state: Any = None
    """What its result would be given as attributes."""


class Unreadable(Exception):
    """A pickle does something else than to describe data."""


def read_pickle(data: bytes, names: Set[tuple[str, str]]) -> Any:
    """Return what a pickle describes, which may refer to `names`: (module, name). Raises
    Unreadable."""
    machine = _Machine(names)
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number == MAX_INSTRUCTIONS:
                raise Unreadable(f"it has more than {MAX_INSTRUCTIONS} instructions")
            if opcode.name == "STOP":
                [result] = machine.stack
                return result
            machine.run(opcode.name, argument)
    except Unreadable:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, UnicodeError) as error:
        raise Unreadable(f"it is damaged: {error}") from None
    raise Unreadable("it ends too early")


PUSHED = frozenset(
    {
        "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
        "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
    }
)  # fmt: skip
"""Instructions that push their argument."""
CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict,
}  # fmt: skip
IGNORED = frozenset({"PROTO", "FRAME"})


class _Machine:
    def __init__(self, names: Set[tuple[str, str]]) -> None:
        self._names = names
        self.stack: Stack = []
        self._marks: list[Stack] = []
        """Stacks below a mark."""
        self._memo: dict[int, Any] = {}

    def run(self, instruction: str, argument: Any) -> None:
        if instruction in IGNORED:
            return
        if instruction in PUSHED:
            self.stack.append(argument)
        elif instruction in CONSTANTS:
            self.stack.append(CONSTANTS[instruction]())
        elif (method := getattr(self, f"_{instruction.lower()}", None)) is not None:
            method(argument)
        else:
            raise Unreadable(f"it has the instruction {instruction}")

    # ------------------------------------------------------------ what an instruction does

    def _mark(self, _: None) -> None:
        self._marks.append(self.stack)
        self.stack = []

    def _to_mark(self) -> Stack:
        items, self.stack = self.stack, self._marks.pop()
        return items

    def _memoize(self, _: None) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def _binput(self, place: int) -> None:
        self._memo[place] = self.stack[-1]

    _long_binput = _binput

    def _binget(self, place: int) -> None:
        self.stack.append(self._memo[place])

    _long_binget = _binget

    def _tuple(self, _: None) -> None:
        items = self._to_mark()
        self.stack.append(tuple(items))

    def _tuple1(self, _: None) -> None:
        self._last(1)

    def _tuple2(self, _: None) -> None:
        self._last(2)

    def _tuple3(self, _: None) -> None:
        self._last(3)

    def _last(self, count: int) -> None:
        if len(self.stack) < count:
            raise Unreadable("it is damaged: its stack is empty")
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def _append(self, _: None) -> None:
        item = self.stack.pop()
        self._target(list).append(item)

    def _appends(self, _: None) -> None:
        items = self._to_mark()
        self._target(list).extend(items)

    def _setitem(self, _: None) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key], [value])

    def _setitems(self, _: None) -> None:
        items = self._to_mark()
        self._set(items[::2], items[1::2])

    def _set(self, keys: Stack, values: Stack) -> None:
        # The hash of nested tuples, which may share their items, can take forever.
        if not all(isinstance(key, str | int) for key in keys):
            raise Unreadable("a mapping has other keys than texts and numbers")
        self._target(dict).update(zip(keys, values, strict=True))

    def _target(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise Unreadable("it changes what is no list or mapping")
        return self.stack[-1]

    # ------------------------------------------------------------ names and calls

    def _global(self, both: str) -> None:
        module, _, name = both.partition(" ")
        self._push_name(module, name)

    def _stack_global(self, _: None) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._push_name(module, name)

    def _push_name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise Unreadable("it names something by what is no text")
        if (module, name) not in self._names:
            raise Unreadable(f"it names {module}.{name}")
        self.stack.append(Name(module, name))

    def _reduce(self, _: None) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, Name) or type(args) is not tuple:
            raise Unreadable("it calls what is no name")
        self.stack.append(Call(name, args))

    _newobj = _reduce

    def _build(self, _: None) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Call):
            raise Unreadable("it changes what it does not make")
        self.stack[-1].state = state
