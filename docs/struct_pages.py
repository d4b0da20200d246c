"""docs/reference/engine-config.md and sampling-params.md: fields of structs.

A field's meaning is its `Meta` description or the docstring under it; nothing is written twice.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from typing import Any

import msgspec
from markdown_table import table

from jackfield.core import outputs, pooling_params
from jackfield.core import sampling_params as params
from jackfield.core.config import EngineConfig, StructuredOutputsConfig
from jackfield.entrypoints.struct_fields import described, type_text


def engine_config() -> str:
    """Every engine option."""
    return (
        "# EngineConfig\n\n"
        "Every engine option. In Python: `EngineConfig(max_model_len=4096)`; on the command line: "
        "`jackfield serve --max-model-len 4096` (a field's flag is its name with dashes; "
        "see [cli](cli.md)). An unknown option, a value of the wrong type or out of range, and "
        "options at odds with each other raise `ConfigError` with the field's name.\n\n"
        "Source: [core/config/](../../core/config). What `auto` becomes on this machine is "
        "decided in `core/engine/resolve_config.py` and `core/loading/model_config.py`.\n\n"
        + table(["field", "type", "default", "meaning"], field_rows(EngineConfig))
        + "\n## StructuredOutputsConfig\n\n"
        + f"{inspect.cleandoc(StructuredOutputsConfig.__doc__ or '')} A part's flag is "
        "`--structured-outputs-config.backend`; `--guided-decoding-backend` is the same.\n\n"
        + table(["field", "type", "default", "meaning"], field_rows(StructuredOutputsConfig))
    )


def sampling_params() -> str:
    """What a request may ask for, and what comes back."""
    parts = [
        "# SamplingParams and outputs\n\n",
        "What a request may ask for, and what comes back. Source: "
        "[core/sampling_params.py](../../core/sampling_params.py), "
        "[core/outputs.py](../../core/outputs.py) and "
        "[core/pooling_params.py](../../core/pooling_params.py). "
        "A value out of range raises "
        "`InvalidRequest` with the field's name.\n",
    ]
    for cls in (
        params.SamplingParams,
        params.StructuredOutputsParams,
        outputs.RequestOutput,
        outputs.CompletionOutput,
        outputs.RequestTimings,
        outputs.Logprob,
        pooling_params.PoolingParams,
        outputs.PoolingRequestOutput,
        pooling_params.PoolingOutput,
    ):
        about = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
        parts.append(f"\n## {cls.__name__}\n\n{about}\n\n")
        parts.append(table(["field", "type", "default", "meaning"], field_rows(cls)))
    parts.append("\n## OutputKind\n\n" + inspect.cleandoc(params.OutputKind.__doc__ or ""))
    kinds = _enum_docs(params.OutputKind)
    parts.append("\n\n" + table(["value", "meaning"], [[f"`{k}`", v] for k, v in kinds]))
    limits = ("MAX_N", "MAX_STOP_STRINGS", "MAX_STOP_LENGTH")
    parts.append("\n## Fixed limits\n\n")
    parts.append(table(["name", "value"], [[f"`{n}`", f"`{getattr(params, n)}`"] for n in limits]))
    return "".join(parts)


def _enum_docs(cls: Any) -> list[tuple[str, str]]:
    (body,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(body, ast.ClassDef)
    pairs = zip(body.body, body.body[1:], strict=False)
    return [
        (ast.literal_eval(field.value), ast.literal_eval(after.value))
        for field, after in pairs
        if isinstance(field, ast.Assign) and isinstance(after, ast.Expr)
    ]


def field_docs(cls: type) -> dict[str, str]:
    """Field → the docstring under it."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                assert isinstance(field.target, ast.Name)
                docs[field.target.id] = " ".join(after.value.value.split())
    return docs


def field_rows(cls: Any) -> list[list[str]]:
    """[field, type, default, meaning] of a struct. Raises SystemExit where a meaning is missing."""
    hints = typing.get_type_hints(cls, include_extras=True)
    docs = field_docs(cls)
    rows = []
    for field in msgspec.structs.fields(cls):
        hint = hints[field.name]
        meaning = described(hint) or docs.get(field.name, "")
        if not meaning:
            raise SystemExit(f"{cls.__name__}.{field.name} has no docstring")
        rows.append([f"`{field.name}`", type_text(hint), _default(field), meaning])
    return rows


def _default(field: Any) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()!r}`"
    if field.default is msgspec.NODEFAULT:
        return "required"
    value = field.default
    if isinstance(value, msgspec.Struct):
        return f"`{type(value).__name__}()`"
    return f"`{str(value) if isinstance(value, str) and value else repr(value)}`"
