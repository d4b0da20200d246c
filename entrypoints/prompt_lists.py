"""Arguments of `LLM`: one prompt or several, and one value for all of them or one for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from ..core.errors import InvalidRequest

T = TypeVar("T")


def listed(prompts: Any) -> list[Any]:
    """Return one prompt (text, token ids or a dict) or several as a list. Raises InvalidRequest."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    check_list("prompts", prompts)
    if len(prompts) > 0 and isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


def check_list(name: str, value: Any) -> None:
    """Raise InvalidRequest unless the value is a sequence or array."""
    places = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if not places or isinstance(value, str | bytes | Mapping):
        raise InvalidRequest(f"{name}: must be a list, got {type(value).__name__}", param=name)


def for_each(
    name: str, value: T | Sequence[T], kind: type | tuple[type, ...], prompts: Sequence[Any]
) -> list[T]:
    """Return the value of each prompt. kind: of a value that is for all. Raises InvalidRequest for
    another number of values than prompts."""
    if isinstance(value, kind):
        return [cast(T, value)] * len(prompts)
    check_list(name, value)
    values = list(cast(Sequence[T], value))
    if len(values) != len(prompts):
        raise InvalidRequest(f"{name}: {len(values)} given for {len(prompts)} prompts", param=name)
    return values
