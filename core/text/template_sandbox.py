"""A sandboxed Jinja environment for chat templates, with the usual extensions and cost limits.

Templates are data: loop turns, calls, filters, tests, comparisons, operators, slices and outputs
spend the rendering's budget. An operation's input is bounded first, because a call into C cannot be
stopped.
"""

from __future__ import annotations

import contextvars
import datetime
import json
import operator
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView
from typing import Any, NoReturn

from jinja2 import nodes, pass_environment
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from .control_tokens import MARK

MAX_OUTPUT = 16 * 2**20
"""Most characters of a rendering, of any string built, and of all strings in an operation's input,
counting repetitions."""
MAX_STEPS = 1_000_000
"""One step: a loop turn, call or operation; 256 bytes built; 1,024 characters or 4 values read."""
MAX_SECONDS = 5.0
_MAX_PADDING = 10_000
_MAX_ITEMS = 100_000
_MAX_SLOW = 1 << 16
_SHALLOW_FILTERS = frozenset(
    {
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "first",
        "items",
        "last",
        "length",
        "list",
        "map",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
    }
)
"""Filters that do not read their value's items; tests and filters applied to items count
themselves."""
_SLOW_FILTERS = frozenset(
    {
        "e",
        "escape",
        "forceescape",
        "pprint",
        "striptags",
        "title",
        "truncate",
        "urlencode",
        "wordcount",
        "wordwrap",
        "xmlattr",
    }
)
"""Filters limited to `_MAX_SLOW` characters: regular expressions, and loops over slices."""
_DEEP_TESTS = frozenset(
    {
        "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le",
        "lessthan", "lower", "lt", "ne", "upper",
    }
)  # fmt: skip
"""Tests that read into their values."""
_PADDING_METHODS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


class Budget:
    def __init__(self, steps: int | None = None) -> None:
        """steps: default MAX_STEPS."""
        self._steps = MAX_STEPS if steps is None else steps
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, steps: int = 1) -> None:
        """Count steps. Raises SecurityError."""
        before = self._steps
        self._steps -= steps
        if self._steps < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")
        if before >> 6 != self._steps >> 6 and time.monotonic() > self._deadline:
            raise SecurityError(f"it takes more than {MAX_SECONDS:g} seconds")


_budget: contextvars.ContextVar[Budget] = contextvars.ContextVar("template_budget")


def _built(value: Any) -> Any:
    """Count a built value, and return it."""
    if isinstance(value, str | bytes):
        _check_size(len(value))
        _budget.get().spend(sys.getsizeof(value) >> 8)
    elif isinstance(value, list | tuple | dict):
        _budget.get().spend(len(value) >> 3)
    return value


def _looked_at(*values: Any) -> int:
    """Count everything in values with repetitions (a list may contain one long text many times);
    return the characters.
    """
    budget = _budget.get()
    size = seen = 0
    waiting = list(values)
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | MappingView):
            waiting += item  # type: ignore[arg-type]
        elif isinstance(item, Namespace):
            waiting.append(item._Namespace__attrs)  # type: ignore[attr-defined]
        seen += 1
        if not seen & 3:
            budget.spend()
        if size + seen > MAX_OUTPUT or len(waiting) > MAX_OUTPUT:
            _check_size(MAX_OUTPUT + 1)
    budget.spend(size >> 10)
    return size


class _Meter(Extension):
    """Functions that `_Metering` calls; templates cannot reach it."""

    identifier = "jackfield.meter"

    def step(self, steps: int) -> str:
        _budget.get().spend(steps)
        return ""

    def turn(self) -> bool:
        """Count an item of a loop with a condition."""
        _budget.get().spend()
        return True

    def concat(self, *values: Any) -> str:
        _budget.get().spend()
        _check_size(_looked_at(*values))
        return str(_built("".join(map(str, values))))

    def compare(self, name: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.spend()
        if name in ("in", "notin"):
            if isinstance(right, str):
                budget.spend(len(right) >> 10)
            elif isinstance(left, list | tuple | dict) or _is_long(left):
                _looked_at(left, () if isinstance(right, Mapping) else right)
            elif isinstance(right, list | tuple):
                budget.spend(len(right) >> 4)
        elif isinstance(left, list | tuple | dict) and isinstance(right, list | tuple | dict):
            _looked_at(left, right)
        elif isinstance(left, str):
            budget.spend(len(left) >> 10)
        return _COMPARISONS[name](left, right)

    def slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        _budget.get().spend()
        return _built(value[start:stop:step])

    def key(self, value: Any) -> Any:
        """Return a dict key; tuples are counted, as they are hashed."""
        if isinstance(value, tuple):
            _looked_at(value)
        return value


class _Metering(NodeTransformer):
    """Inserts metering calls into loops and macros, and for `~`, comparisons, slices, and computed
    keys.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._metered(node)
        if node.test is not None:
            node.test = nodes.And(_meter_call("turn", []), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._metered(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._metered(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _meter_call("concat", node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        result: nodes.Expr | None = None
        left = node.expr
        for operand in node.ops:
            compared = _meter_call("compare", [nodes.Const(operand.op), left, operand.expr])
            result = compared if result is None else nodes.And(result, compared)
            left = operand.expr
        assert result is not None
        return result

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _meter_call("slice", [node.node, *(bound or nodes.Const(None) for bound in bounds)])

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _meter_call("key", [node.key])
        return node

    def _metered(self, node: Any) -> nodes.Node:
        # What stands in a body costs, too: lists of many items, long texts.
        size = sum(1 for _ in node.find_all(nodes.Node)) >> 6
        size += sum(len(data.data) for data in node.find_all(nodes.TemplateData)) >> 8
        self.generic_visit(node)
        node.body.insert(0, nodes.Output([_meter_call("step", [nodes.Const(1 + size)])]))
        return node


def _is_long(value: Any) -> bool:
    return isinstance(value, str) and len(value) > 1024


def _meter_call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.ExtensionAttribute(_Meter.identifier, name), arguments, [], None, None)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks training targets: rendered as its
    body.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_shown,
            extensions=["jinja2.ext.loopcontrols", _Generation, _Meter],
        )
        self.filters["tojson"] = _tojson
        self.filters["json_or_text"] = _json_or_text
        self.filters["sum"] = _sum
        self.filters.pop("urlize", None)  # Regular expressions over text from outside.
        self.filters = {name: _limited(name, call) for name, call in self.filters.items()}
        self.tests = {name: _counted(name, call) for name, call in self.tests.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals.pop("lipsum", None)

    def tree(self, source: str) -> nodes.Template:
        """Return a template's syntax tree, without metering."""
        return super()._parse(source, None, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        tree = _Metering().visit(tree)
        tree.set_environment(self)
        for node in tree.find_all(nodes.Node):
            if node.lineno is None:
                node.lineno = 1
        return tree

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            _looked_at(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _budget.get().spend()
        if operator == "+" and _sized(left) and _sized(right):
            _check_size(len(left) + len(right))
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if _sized(sequence) and isinstance(count, int):
                    _check_size(len(sequence) * count)
                    if not isinstance(sequence, str) and len(sequence) * count > _MAX_ITEMS:
                        raise SecurityError(f"it builds a list of more than {_MAX_ITEMS} items")
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            _refuse_wide_format(left)
            _check_size(len(left) + _looked_at(right) * left.count("%"))
        return _built(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, _Meter):
            return __obj(*args)
        _budget.get().spend()
        if isinstance(owner, str):
            args = tuple(_in_full(arg) for arg in args)
            _looked_at(owner, *args, *kwargs.values())
            _check_method(owner, getattr(__obj, "__name__", ""), args, kwargs)
        elif not isinstance(__obj, Macro | LoopContext):
            _looked_at(*args, *kwargs.values())
            if isinstance(owner, list | tuple):
                _looked_at(owner)
        return _built(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        inner = wrapped

        def bounded(*args: Any, **kwargs: Any) -> str:
            _refuse_wide_format(value.__self__)
            return inner(*args, **kwargs)

        return bounded

    def render(self, template: Any, variables: dict[str, Any], budget: Budget) -> str:
        """Render within the budget.

        Raises jinja2's TemplateError and whatever templates raise.
        """
        token = _budget.set(budget)
        try:
            parts: list[str] = []
            size = 0
            for part in template.generate(variables):
                size += len(part)
                _check_size(size)
                parts.append(part)
            return "".join(parts)
        finally:
            _budget.reset(token)


def _sized(value: Any) -> bool:
    return isinstance(value, str | list | tuple | bytes)


def _check_size(size: int) -> None:
    if size > MAX_OUTPUT:
        raise SecurityError(f"it writes more than {MAX_OUTPUT} characters")


def _shown(value: Any) -> Any:
    """Count a written value, except constants at compile time."""
    if _budget.get(None) is not None:
        if isinstance(value, str):
            return _built(value)
        _looked_at(value)
    return value


def _in_full(value: Any) -> Any:
    """Return an iterator's items as a list, to be counted first."""
    if not isinstance(value, Iterator | MappingView):
        return value
    items: list[Any] = []
    for item in value:  # type: ignore[union-attr]
        _budget.get().spend()
        items.append(item)
    return items


def _check_bits(bits: int) -> None:
    if bits > 4096:
        raise SecurityError("it computes with numbers of more than 4096 bits")


def _check_method(owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse str methods whose result would exceed the bounds."""
    if name in _PADDING_METHODS:
        numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, int)]
        if any(number > _MAX_PADDING for number in numbers):
            raise SecurityError(f"it pads to more than {_MAX_PADDING} characters")
        _check_size(len(owner) * (max(numbers, default=8) if name == "expandtabs" else 1))
    elif name == "replace" and len(args) >= 2:
        _check_replace(owner, args[0], args[1])
    elif name == "translate" and args:
        values = args[0].values() if isinstance(args[0], Mapping) else args[0]
        _check_size(len(owner) * max((len(v) for v in values if _sized(v)), default=1))
    elif name in ("format", "format_map"):
        _check_size(len(owner) + owner.count("{") * _looked_at(*args, *kwargs.values()))
    elif name == "join" and args and _sized(args[0]):
        _check_size(len(owner) * len(args[0]) + sum(len(v) for v in args[0] if _sized(v)))


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        _check_size(len(text) + text.count(old) * (len(new) - len(old)))


def _refuse_wide_format(text: str) -> None:
    """Refuse format texts with a computed width, or one of five or more digits."""
    run = 0
    for char in text:
        run = run + 1 if char.isdigit() else 0
        if run > 4:
            raise SecurityError("it formats to a width of five digits or more")
    if "*" in text or "{" in text.partition("{")[2].partition("}")[0]:
        raise SecurityError("it formats to a computed width")


def _limited(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter to count its input and output, and bound its result beforehand."""

    def limited(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.spend()
        if name in _SHALLOW_FILTERS:
            budget.spend(sum(len(arg) for arg in args if _sized(arg)) >> 4)
        else:
            args = tuple(_in_full(arg) for arg in args)
            kwargs = {key: _in_full(value) for key, value in kwargs.items()}
            if _looked_at(*args, *kwargs.values()) > _MAX_SLOW and name in _SLOW_FILTERS:
                raise SecurityError(f"{name} takes at most {_MAX_SLOW} characters")
        _check_filter(name, args, kwargs)
        result = original(*args, **kwargs)
        return result if any(result is arg for arg in args) else _built(result)

    return _with_marks(limited, original)


def _check_filter(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that make a result too long."""
    values = [*args, *kwargs.values()]
    texts = [value for value in values if isinstance(value, str)]
    numbers = [abs(value) for value in values if isinstance(value, int)]
    if name == "replace" and len(texts) >= 3:
        _check_replace(texts[0], texts[1], texts[2])
    elif name == "join":
        items: Any = next((v for v in args if isinstance(v, list | tuple | dict)), ())
        _check_size(len(items) * max((len(text) for text in texts), default=0))
    elif name == "format" and texts:
        _refuse_wide_format(texts[0])
        _check_size(len(texts[0]) + sum(map(len, texts[1:])) * texts[0].count("%"))
    elif name in ("slice", "batch", "round") and max(numbers, default=0) > _MAX_PADDING:
        raise SecurityError(f"it cuts or rounds to more than {_MAX_PADDING}")
    elif name in ("center", "indent"):
        if max(numbers, default=0) > _MAX_PADDING:
            raise SecurityError(f"it pads to more than {_MAX_PADDING} characters")
        width = max([4, *numbers, *(len(text) for text in texts[1:])])
        if texts:
            _check_size(len(texts[0]) + (texts[0].count("\n") + 1) * width)
    elif name == "wordwrap" and texts:
        _check_size(len(texts[0]) * max(map(len, texts)))


def _counted(name: str, original: Any) -> Callable[..., Any]:
    """Wrap a test to count itself and its input."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        _budget.get().spend()
        if name in _DEEP_TESTS:
            _looked_at(*args, *kwargs.values())
        return original(*args, **kwargs)

    return _with_marks(counted, original)


def _with_marks(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Copy Jinja's marks of implicit arguments."""
    for attribute in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(original, attribute):
            setattr(wrapper, attribute, getattr(original, attribute))
    return wrapper


@pass_environment
def _sum(
    environment: TemplateEnvironment, value: Any, attribute: Any = None, start: Any = 0
) -> Any:
    """Return the sum of items; Python's blocks the interpreter, and copies lists."""
    get = (lambda item: item) if attribute is None else make_attrgetter(environment, attribute)
    for item in value:
        start = environment.call_binop(None, "+", start, get(item))
    return start


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Iterable[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes, as in transformers' templates."""
    width = len(indent) if isinstance(indent, str) else indent or 0
    marks = None if separators is None else tuple(map(str, separators))
    longest = max(map(len, marks or ()), default=0)
    if width > 100 or longest > 100:
        raise SecurityError("it indents by more than 100")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=marks,  # type: ignore[arg-type]
        sort_keys=sort_keys,
    )
    if indent is None and longest < 4:
        text = encoder.encode(value)
    else:
        pieces, size = [], 0
        for piece in encoder.iterencode(value):
            size += len(piece)
            _check_size(size)
            pieces.append(piece)
        text = "".join(pieces)
    return text.replace(json.dumps(MARK)[1:-1], MARK) if ensure_ascii else text


def _json_or_text(text: str) -> Any:
    """Return a JSON text's value, else the text, for checkpoint formats whose tool results may be
    either.
    """
    try:
        value = json.loads(text)
        _looked_at(value)
        return value
    except (ValueError, RecursionError):
        return text


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > 1000:
        raise SecurityError("its date format is too long")
    return datetime.datetime.now().strftime(format)
