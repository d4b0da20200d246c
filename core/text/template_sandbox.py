"""A sandboxed Jinja environment for chat templates, with the usual extensions and cost limits."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .template_budget import (
    Budget,
    built,
    check_bits,
    check_size,
    count_input,
    current_budget,
    in_full,
    is_sized,
)
from .template_filters import (
    bounded_filter,
    check_method,
    counted_test,
    json_or_text,
    refuse_wide_format,
    sum_items,
    tojson,
)
from .template_metering import Meter, Metering

_MAX_ITEMS = 100_000


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
            extensions=["jinja2.ext.loopcontrols", _Generation, Meter],
        )
        self.filters["tojson"] = tojson
        self.filters["json_or_text"] = json_or_text
        self.filters["sum"] = sum_items
        self.filters.pop("urlize", None)  # Regular expressions over text from outside.
        self.filters = {name: bounded_filter(name, call) for name, call in self.filters.items()}
        self.tests = {name: counted_test(name, call) for name, call in self.tests.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals.pop("lipsum", None)

    def tree(self, source: str) -> nodes.Template:
        """Return a template's syntax tree, without metering."""
        return super()._parse(source, None, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        tree = Metering().visit(tree)
        tree.set_environment(self)
        for node in tree.find_all(nodes.Node):
            if node.lineno is None:
                node.lineno = 1
        return tree

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            count_input(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        current_budget.get().spend()
        if operator == "+" and is_sized(left) and is_sized(right):
            check_size(len(left) + len(right))
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if is_sized(sequence) and isinstance(count, int):
                    check_size(len(sequence) * count)
                    if not isinstance(sequence, str) and len(sequence) * count > _MAX_ITEMS:
                        raise SecurityError(f"it builds a list of more than {_MAX_ITEMS} items")
            if isinstance(left, int) and isinstance(right, int):
                check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            refuse_wide_format(left)
            check_size(len(left) + count_input(right) * left.count("%"))
        return built(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, Meter):
            return __obj(*args)
        current_budget.get().spend()
        if isinstance(owner, str):
            args = tuple(in_full(arg) for arg in args)
            count_input(owner, *args, *kwargs.values())
            check_method(owner, getattr(__obj, "__name__", ""), args, kwargs)
        elif not isinstance(__obj, Macro | LoopContext):
            count_input(*args, *kwargs.values())
            if isinstance(owner, list | tuple):
                count_input(owner)
        return built(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        inner = wrapped

        def bounded(*args: Any, **kwargs: Any) -> str:
            refuse_wide_format(value.__self__)
            return inner(*args, **kwargs)

        return bounded

    def render(self, template: Any, variables: dict[str, Any], budget: Budget) -> str:
        """Render within the budget.

        Raises jinja2's TemplateError and whatever templates raise.
        """
        token = current_budget.set(budget)
        try:
            parts: list[str] = []
            size = 0
            for part in template.generate(variables):
                size += len(part)
                check_size(size)
                parts.append(part)
            return "".join(parts)
        finally:
            current_budget.reset(token)


def _shown(value: Any) -> Any:
    """Count a written value, except constants at compile time."""
    if current_budget.get(None) is not None:
        if isinstance(value, str):
            return built(value)
        count_input(value)
    return value


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > 1000:
        raise SecurityError("its date format is too long")
    return datetime.datetime.now().strftime(format)
