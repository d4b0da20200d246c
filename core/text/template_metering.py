"""Puts calls that count into a template's syntax tree, where Jinja offers no other way in."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.visitor import NodeTransformer

from .template_budget import built, check_size, count_input, current_budget

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


class Meter(Extension):
    """Functions that `Metering` calls; templates cannot reach it."""

    identifier = "jackfield.meter"

    def step(self, steps: int) -> str:
        current_budget.get().spend(steps)
        return ""

    def turn(self) -> bool:
        """Count an item of a loop with a condition."""
        current_budget.get().spend()
        return True

    def concat(self, *values: Any) -> str:
        current_budget.get().spend()
        check_size(count_input(*values))
        return str(built("".join(map(str, values))))

    def compare(self, name: str, left: Any, right: Any) -> Any:
        budget = current_budget.get()
        budget.spend()
        if name in ("in", "notin"):
            if isinstance(right, str):
                budget.spend(len(right) >> 10)
            elif isinstance(left, list | tuple | dict) or _is_long(left):
                count_input(left, () if isinstance(right, Mapping) else right)
            elif isinstance(right, list | tuple):
                budget.spend(len(right) >> 4)
        elif isinstance(left, list | tuple | dict) and isinstance(right, list | tuple | dict):
            count_input(left, right)
        elif isinstance(left, str):
            budget.spend(len(left) >> 10)
        return _COMPARISONS[name](left, right)

    def slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        current_budget.get().spend()
        return built(value[start:stop:step])

    def key(self, value: Any) -> Any:
        """Return a dict key; tuples are counted, as they are hashed."""
        if isinstance(value, tuple):
            count_input(value)
        return value


class Metering(NodeTransformer):
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
    return nodes.Call(nodes.ExtensionAttribute(Meter.identifier, name), arguments, [], None, None)
