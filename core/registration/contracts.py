"""Checks registered objects, mostly without calling them, so that wrong references are refused by
name.

`protocols.py` defines the methods; this lists the minimum.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec


class Contract(NamedTuple):
    of: str
    """Protocol or base class, for messages."""
    required: tuple[str, ...] = ()
    """Methods and class attributes."""
    one_of: tuple[str, ...] = ()
    """At least one is required."""
    base: str = ""
    """"module:class" to subclass."""
    defaults: str = ""
    """"module:class" with defaults of all other methods."""


CONTRACTS = {
    "model": Contract(
        "protocols.Model", ("forward", "weight_map"), ("compute_logits", "pooling_states")
    ),
    "config": Contract("protocols.CheckpointConfig", one_of=("from_dict", "fields")),
    "checkpoint_format": Contract(
        "protocols.CheckpointFormat",
        (
            "config_file",
            "tokenizer_file",
            "load_format",
            "read_config",
            "read_chat_templates",
            "read_tokenizer",
        ),
    ),
    "options": Contract("msgspec.Struct", base="msgspec:Struct"),
    "attention_backend": Contract(
        "protocols.AttentionBackend", base="jackfield.core.protocols:AttentionBackend"
    ),
    "latent_attention_backend": Contract(
        "protocols.LatentAttentionBackend", base="jackfield.core.protocols:LatentAttentionBackend"
    ),
    "operations": Contract(
        "core.nn.operations.Operations", base="jackfield.core.nn.operations:Operations"
    ),
    "quantization": Contract("protocols.QuantizationMethod", ("supports", "from_config", "layer")),
    "reasoning_parser": Contract("protocols.ReasoningParser", ("feed", "finish")),
    "tool_parser": Contract("protocols.ToolParser", ("feed", "finish")),
    "kv_connector": Contract(
        "protocols.KVConnector", ("make_scheduler", "make_worker", "metadata_type")
    ),
    "kv_compressor": Contract(
        "protocols.KVCompressor", base="jackfield.core.protocols:KVCompressor"
    ),
    "speculator": Contract("protocols.Speculator", base="jackfield.core.protocols:Speculator"),
    "structured_backend": Contract(
        "protocols.GrammarBackend", ("bounded", "unavailable", "refusal", "compile")
    ),
    "logits_processor": Contract(
        "protocols.LogitsProcessor", base="jackfield.core.protocols:LogitsProcessor"
    ),
    "weight_loader": Contract("protocols.WeightLoader", ("load",)),
    "media_model": Contract(
        "protocols.MediaModel", ("modalities", "spans", "refusal", "processor", "encoder")
    ),
    "adapter_format": Contract("protocols.AdapterFormat", ("is_at", "read")),
    "adapter_resolver": Contract("protocols.AdapterResolver", ("resolve",)),
    "executor": Contract(
        "protocols.Executor",
        ("start", "submit", "ask", "stop"),
        defaults="jackfield.core.protocols:Executor",
    ),
    "collectives": Contract(
        "protocols.Collectives",
        ("supports", "all_reduce", "all_gather", "send", "receive", "close"),
    ),
    "all2all_backend": Contract(
        "protocols.All2All", ("supports", "recordable", "dispatch", "combine", "close")
    ),
    "schedule_policy": Contract("protocols.SchedulePolicy", ("key",)),
    "command": Contract("a function of (argv: list[str])", ("__call__",)),
}
"""Requirements by kind; missing kinds accept any callable."""


def violation(kind: str, thing: object) -> str | None:
    """Return why `thing` is not of this kind, or None.

    Other callables are factories.
    """
    if thing is None:
        return "it is None"
    contract = CONTRACTS.get(kind, Contract("something to call", ("__call__",)))
    if contract.base:
        base = _class(contract.base)
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
    if kind == "checkpoint_format":
        return _unnamed(thing)
    return _undeclared(thing) if kind in ("config", "model") else None


def completed(kind: str, thing: Any) -> Any:
    """Return `thing`, or a subclass with defaults of missing optional methods."""
    defaults = CONTRACTS[kind].defaults if kind in CONTRACTS else ""
    if not defaults or not isinstance(thing, type) or issubclass(thing, base := _class(defaults)):
        return thing
    return type(thing.__name__, (thing, base), {"__module__": thing.__module__})


def _class(reference: str) -> type:
    module, _, name = reference.partition(":")
    cls: type = getattr(importlib.import_module(module), name)
    return cls


def _undeclared(thing: object) -> str | None:
    """Return the fault of declared config.json fields."""
    fields = getattr(thing, "config_fields", {})
    kind = _class("jackfield.core.protocols.field_kinds:FieldKind")
    if not isinstance(fields, Mapping):
        return "its config_fields is no mapping of names"
    wrong = [str(name) for name, value in fields.items() if not isinstance(value, kind)]
    return f"its config_fields has no FieldKind for {', '.join(wrong)}" if wrong else None


def _unnamed(thing: object) -> str | None:
    """Return the fault of a checkpoint format's names."""
    for name in ("config_file", "tokenizer_file", "load_format"):
        value = getattr(thing, name, None)
        if not isinstance(value, str) or not value or value != value.rpartition("/")[2]:
            return f"its {name} is no name: {value!r}"
    return None


def _undecided(schema: object) -> str | None:
    """Return a schema's fault: options need defaults, as plugins are active wherever installed."""
    for field in msgspec.structs.fields(schema):  # type: ignore[arg-type]
        if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
            return f"its field {field.name} has no default"
    return None
