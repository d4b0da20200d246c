"""Finds the small slips that could be made in a file: a piece of its text, and what replaces it."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

FLIPPED = {ast.Lt: b"<=", ast.LtE: b"<", ast.Gt: b">=", ast.GtE: b">"}
QUIET = {
    "debug",
    "error",
    "exception",
    "info",
    "log",
    "print",
    "warn",
    "warning",
    "cast",
    "TypeVar",
}
"""Calls of these write what no program reads, or name types."""
SYMMETRIC = {"gcd", "isinstance", "issubclass", "max", "min"}
MOST_OFF_BY_ONE = 16
"""Larger constants are sizes and limits of which one more is no other behaviour."""
UNREAD = {"__repr__", "__str__"}


class Slip(NamedTuple):
    """One change of one file."""

    file: str
    """Relative to the package."""
    line: int
    kind: str
    before: str
    after: str
    start: int
    """In bytes of the file; `end` too."""
    end: int
    scope: str
    """Source of the function or class around it."""
    key: str
    """Names it while its line stays as it is, wherever the line moves."""

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


class Finder:
    """Slips of one file, in the order of its text."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file = file
        self.source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._seen: dict[str, int] = {}

    def find(self) -> list[Slip]:
        return sorted(self._of(ast.parse(self.source), ""), key=lambda slip: slip.start)

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def _slip(self, kind: str, start: int, end: int, after: bytes, scope: str) -> Slip:
        line = self.source.count(b"\n", 0, start)
        whole = self.source[self._starts[line] : self._starts[line + 1]].strip()
        name = repr((self.file, kind, whole, self.source[start:end], after))
        # The same slip on an equal line of the same file is another one.
        self._seen[name] = self._seen.get(name, 0) + 1
        key = hashlib.sha256(f"{name}{self._seen[name]}".encode()).hexdigest()[:12]
        before = self.source[start:end].decode()
        return Slip(self.file, line + 1, kind, before, after.decode(), start, end, scope, key)

    def _of(self, node: ast.AST, scope: str) -> Iterator[Slip]:
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
                return
            case ast.Call() if called(node) in QUIET or called(node).endswith(("Error", "Refused")):
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if node.name in UNREAD:
                    return
                start, end = self._span(node)
                scope = self.source[start:end].decode()
        yield from self._here(node, scope)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._of(child, scope)

    def _here(self, node: ast.AST, scope: str) -> Iterator[Slip]:
        """Those of a node itself."""

        def slip(kind: str, start: int, end: int, after: bytes) -> Slip:
            return self._slip(kind, start, end, after, scope)

        match node:
            case ast.Compare():
                sides = [node.left, *node.comparators]
                for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
                    if type(operator) in FLIPPED:
                        start, end = self._between(left, right, b"<>=")
                        yield slip("boundary", start, end, FLIPPED[type(operator)])
            case ast.BoolOp(values=[first, second, *_]):
                word, other = (b"and", b"or") if isinstance(node.op, ast.And) else (b"or", b"and")
                start, end = self._between(first, second, word)
                yield slip("and, or", start, end, other)
            case ast.UnaryOp(op=ast.Not()):
                start, _ = self._span(node)
                yield slip("not", start, start + len("not"), b"")
            case ast.Constant(value=int(value)) if 0 <= value <= MOST_OFF_BY_ONE and scope:
                if not isinstance(value, bool):
                    start, end = self._span(node)
                    for other in {value + 1, max(value - 1, 0)} - {value}:
                        yield slip("constant", start, end, str(other).encode())
            case ast.Call():
                yield from self._of_call(node, slip)
            case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
                call = node.value.value if isinstance(node.value, ast.Await) else node.value
                if called(call) not in QUIET:  # type: ignore[arg-type]
                    yield slip("statement", *self._span(node), b"pass")
            case ast.AugAssign() | ast.Delete():
                yield slip("statement", *self._span(node), b"pass")
            case ast.If(body=[only], orelse=[]):
                if isinstance(only, ast.Return | ast.Continue | ast.Break):
                    yield slip("early exit", *self._span(only), b"pass")
                elif isinstance(only, ast.Raise):
                    yield slip("check", *self._span(only), b"pass")
            case ast.ExceptHandler(body=[first, *_]) if not isinstance(first, ast.Raise):
                end = self._span(node.body[-1])[1]
                yield slip("handler", self._span(first)[0], end, b"raise")
            case ast.arguments():
                for default in [*node.defaults, *node.kw_defaults]:
                    yield from self._of_default(default, slip)
            case ast.ClassDef():
                for field in node.body:
                    if isinstance(field, ast.AnnAssign):
                        yield from self._of_default(field.value, slip)
        if isinstance(node, ast.Try) and node.finalbody:
            start, end = self._span(node.finalbody[0])[0], self._span(node.finalbody[-1])[1]
            yield slip("finally", start, end, b"pass")

    def _of_call(self, node: ast.Call, slip: Callable[..., Slip]) -> Iterator[Slip]:
        if called(node) in ("min", "max") and isinstance(node.func, ast.Name):
            yield slip(
                "min, max", *self._span(node.func), b"max" if called(node) == "min" else b"min"
            )
        if called(node) in SYMMETRIC:
            return
        for first, second in zip(node.args, node.args[1:], strict=False):
            plain = isinstance(first, ast.Name | ast.Attribute) and type(first) is type(second)
            if plain and ast.dump(first) != ast.dump(second):
                (start, middle), (other, end) = self._span(first), self._span(second)
                text = self.source
                swapped = text[other:end] + text[middle:other] + text[start:middle]
                yield slip("arguments", start, end, swapped)
                return

    def _of_default(self, node: ast.expr | None, slip: Callable[..., Slip]) -> Iterator[Slip]:
        match node:
            case ast.Constant(value=bool(value)):
                yield slip("default", *self._span(node), str(not value).encode())
            case ast.Constant(value=int(value) | float(value)):
                changed = value + 1 if value <= MOST_OFF_BY_ONE else value * 2
                yield slip("default", *self._span(node), str(changed).encode())

    def _between(self, left: ast.AST, right: ast.AST, characters: bytes) -> tuple[int, int]:
        """The operator between two operands, around which there may be parentheses and comments."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = b"\n".join(  # Comments may have the same characters.
            line.partition(b"#")[0].ljust(len(line)) for line in self.source[start:end].split(b"\n")
        )
        first = min(i for i, byte in enumerate(gap) if byte in characters)
        length = (
            len(gap[first:].split()[0].rstrip(b"(")) if characters == b"<>=" else len(characters)
        )
        return start + first, start + first + length


def called(node: ast.Call) -> str:
    """The last word of what is called."""
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def slips_of(file: str, source: bytes) -> list[Slip]:
    """Every slip of a file, each under its own key; what two rules find is there once."""
    slips: dict[tuple[int, int, str], Slip] = {}
    for slip in Finder(file, source).find():
        slips.setdefault((slip.start, slip.end, slip.after), slip)
    return list(slips.values())
