"""What is behind a registered name, checked as far as it can be without using it.

A protocol (`protocols.py`) says what each method means; this says which of them a thing must have
to be worth calling at all, so that a wrong reference is refused by name instead of failing later,
inside whatever happens to call it first.
"""

from __future__ import annotations

import importlib
import inspect
from typing import NamedTuple

import msgspec


class Contract(NamedTuple):
    """Of one kind."""

    of: str
    """Its protocol or base class, for messages."""
    required: tuple[str, ...] = ()
    """Methods and class attributes that each one has."""
    one_of: tuple[str, ...] = ()
    """At least one of these."""
    base: str = ""
    """"module:class" that it must subclass."""


CONTRACTS = {
    "model": Contract(
        "protocols.Model", ("forward", "weight_map"), ("compute_logits", "pooling_states")
    ),
    "config": Contract("protocols.CheckpointConfig", ("from_dict",)),
    "options": Contract("msgspec.Struct", base="msgspec:Struct"),
    "attention_backend": Contract(
        "protocols.AttentionBackend", base="jackfield.core.protocols:AttentionBackend"
    ),
    "operations": Contract(
        "core.nn.operations.Operations", base="jackfield.core.nn.operations:Operations"
    ),
    "quantization": Contract("protocols.QuantizationMethod", ("supports", "from_config", "layer")),
    "reasoning_parser": Contract("protocols.ReasoningParser", ("feed", "finish")),
    "tool_parser": Contract("protocols.ToolParser", ("feed", "finish")),
    "kv_connector": Contract("protocols.KVConnector", ("make_scheduler", "make_worker")),
    "structured_backend": Contract(
        "protocols.GrammarBackend", ("bounded", "unavailable", "refusal", "compile")
    ),
    "logits_processor": Contract(
        "protocols.LogitsProcessor", base="jackfield.core.protocols:LogitsProcessor"
    ),
    "weight_loader": Contract("protocols.WeightLoader", ("load",)),
    "executor": Contract("protocols.Executor", ("start", "submit", "stop")),
    "schedule_policy": Contract("protocols.SchedulePolicy", ("key",)),
    "command": Contract("a function of (argv: list[str])", ("__call__",)),
}
"""Kinds that are not here may be anything that can be called."""


def violation(kind: str, thing: object) -> str | None:
    """Why `thing` cannot be of this kind, in one clause; None when nothing speaks against it.

    What is no class but can be called is taken for a function that makes one.
    """
    if thing is None:
        return "it is None"
    contract = CONTRACTS.get(kind, Contract("something to call", ("__call__",)))
    if contract.base:
        module, _, name = contract.base.partition(":")
        base = getattr(importlib.import_module(module), name)
        if not (isinstance(thing, type) and issubclass(thing, base)):
            return f"it does not subclass {contract.base.replace(':', '.')}"
        if inspect.isabstract(thing):
            missing = sorted(getattr(thing, "__abstractmethods__", ()))
            return f"it does not implement {', '.join(missing)}"
    missing = [name for name in contract.required if not hasattr(thing, name)]
    if contract.one_of and not any(hasattr(thing, name) for name in contract.one_of):
        missing.append(" or ".join(contract.one_of))
    if missing and (isinstance(thing, type) or not callable(thing)):
        return f"it has no {', '.join(missing)} ({contract.of})"
    if kind == "options":
        return _undecided(thing)
    return None


def _undecided(schema: object) -> str | None:
    """Options must have defaults: a plugin is there for all who have it installed."""
    for field in msgspec.structs.fields(schema):  # type: ignore[arg-type]
        if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
            return f"its field {field.name} has no default"
    return None
