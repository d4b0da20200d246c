"""A Jinja environment for chat templates: the usual extensions, and limits on a template's cost.

Templates are data from a checkpoint: they run sandboxed, and every loop turn, call, repetition and
concatenation counts against the budget of the rendering it belongs to.
"""

from __future__ import annotations

import contextvars
import datetime
import json
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .control_tokens import MARK

MAX_OUTPUT = 16 * 2**20
"""Characters of a rendered chat, and of every string a template builds on the way."""
MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
_MAX_PADDING = 10_000
_MAX_ITEMS = 100_000
_COSTLY_FILTERS = (
    "batch",
    "center",
    "format",
    "indent",
    "join",
    "replace",
    "round",
    "slice",
    "string",
)
"""What a short argument can make long."""
_PADDING_METHODS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})


class Budget:
    """The remaining budget of one rendering."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self) -> None:
        """Count one step. Raises SecurityError past the limits."""
        self._steps -= 1
        if self._steps < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")
        if not self._steps & 63 and time.monotonic() > self._deadline:
            raise SecurityError(f"it takes more than {MAX_SECONDS:g} seconds")


_budget: contextvars.ContextVar[Budget] = contextvars.ContextVar("template_budget")


class _Meter(Extension):
    """The functions that `_Metering` calls from a template; templates cannot reach it."""

    identifier = "jackfield.meter"

    def step(self) -> str:
        """Count one loop iteration or macro call."""
        _budget.get().spend()
        return ""

    def concat(self, *values: Any) -> str:
        """Evaluate the `~` operator."""
        _budget.get().spend()
        texts = [str(_check_value(value)) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)


class _Metering(NodeTransformer):
    """Inserts a metering call at the head of every loop and macro body, and in place of `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._metered(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._metered(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._metered(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _meter_call("concat", node.nodes)

    def _metered(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.Output([_meter_call("step", [])]))
        return node


def _meter_call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.ExtensionAttribute(_Meter.identifier, name), arguments, [], None, None)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: marks training targets; rendered as its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of all templates; rendering goes through `render`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_check_value,
            extensions=["jinja2.ext.loopcontrols", _Generation, _Meter],
        )
        self.filters["tojson"] = _tojson
        self.filters["json_or_text"] = _json_or_text
        for name in _COSTLY_FILTERS:
            self.filters[name] = _limited(self.filters[name])
        self.filters.pop("urlize", None)  # Regular expressions over text from outside.
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals.pop("lipsum", None)

    def tree(self, source: str) -> nodes.Template:
        """Return the syntax tree of a template as it is written, without metering."""
        return super()._parse(source, None, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        tree = _Metering().visit(tree)
        tree.set_environment(self)
        for node in tree.find_all(nodes.Node):
            if node.lineno is None:
                node.lineno = 1
        return tree

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
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().spend()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, getattr(__obj, "__name__", ""), args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

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
        """Render within the limits, from this budget.

        Raises jinja2's TemplateError and whatever a template may raise.
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


def _check_value(value: Any) -> Any:
    """Return `value` if its text stays within bounds: lists may contain one long text many
    times."""
    if isinstance(value, list | tuple | dict):
        size = 0
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, dict):
                waiting += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                waiting += item
            size += 1
            if size > MAX_OUTPUT or len(waiting) > MAX_OUTPUT:
                _check_size(MAX_OUTPUT + 1)
    return value


def _check_bits(bits: int) -> None:
    if bits > 4096:
        raise SecurityError("it computes with numbers of more than 4096 bits")


def _check_method(owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse calls of str methods that would build a string out of bounds."""
    if name in _PADDING_METHODS:
        numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, int)]
        if any(number > _MAX_PADDING for number in numbers):
            raise SecurityError(f"it pads to more than {_MAX_PADDING} characters")
        _check_size(len(owner) * (max(numbers, default=8) if name == "expandtabs" else 1))
    elif name == "replace" and len(args) >= 2:
        _check_replace(owner, args[0], args[1])
    elif name == "join" and args and _sized(args[0]):
        _check_size(len(owner) * len(args[0]) + sum(len(v) for v in args[0] if _sized(v)))


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        _check_size(len(text) + text.count(old) * (len(new) - len(old)))


def _refuse_wide_format(text: str) -> None:
    """Refuse format texts with a width of five or more digits, or a computed one."""
    run = 0
    for char in text:
        run = run + 1 if char.isdigit() else 0
        if run > 4:
            raise SecurityError("it formats to a width of five digits or more")
    if "*" in text or "{" in text.partition("{")[2].partition("}")[0]:
        raise SecurityError("it formats to a computed width")


def _limited(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that its result is bounded before it is built."""

    def limited(*args: Any, **kwargs: Any) -> Any:
        _budget.get().spend()
        values = [_check_value(value) for value in (*args, *kwargs.values())]
        texts = [value for value in values if isinstance(value, str)]
        if name == "do_replace" and len(texts) >= 3:
            _check_replace(texts[0], texts[1], texts[2])
        elif name == "sync_do_join" or name == "do_join":
            items = next((v for v in args if isinstance(v, list | tuple)), [])
            _check_size(sum(len(i) for i in items if _sized(i)))
            _check_size(len(items) * max((len(t) for t in texts), default=0))
        elif name == "do_format" and texts:
            _refuse_wide_format(texts[0])
        elif name in ("sync_do_slice", "do_slice", "do_batch", "do_round"):
            if any(isinstance(v, int) and abs(v) > _MAX_PADDING for v in values[1:]):
                raise SecurityError(f"it cuts or rounds to more than {_MAX_PADDING}")
        elif name in ("do_center", "do_indent"):
            if any(isinstance(v, int) and v > _MAX_PADDING for v in values):
                raise SecurityError(f"it pads to more than {_MAX_PADDING} characters")
            widths = [v for v in values if isinstance(v, int)] or [4]
            width = max([*widths, *(len(text) for text in texts[1:])])
            if texts:
                _check_size(len(texts[0]) + (texts[0].count("\n") + 1) * width)
        return original(*args, **kwargs)

    name = original.__name__
    for attribute in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(original, attribute):
            setattr(limited, attribute, getattr(original, attribute))
    return limited


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Iterable[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes, as transformers writes it in templates."""
    if isinstance(indent, int) and indent > 100:
        raise SecurityError("it indents by more than 100")
    text = json.dumps(
        _check_value(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else tuple(separators),  # type: ignore[arg-type]
        sort_keys=sort_keys,
    )
    return text.replace(json.dumps(MARK)[1:-1], MARK) if ensure_ascii else text


def _json_or_text(text: str) -> Any:
    """Return the value of a JSON text; of any other text, the text itself. For checkpoint formats,
    whose templates are not those of transformers: tool results may be either."""
    try:
        return _check_value(json.loads(text))
    except (ValueError, RecursionError):
        return text


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > 1000:
        raise SecurityError("its date format is too long")
    return datetime.datetime.now().strftime(format)
