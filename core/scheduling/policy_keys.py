"""Checks that a schedule policy's keys are comparable."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from ..errors import RequestFailed, shown
from ..protocols.executors import SchedulePolicy
from ..request import Request

_Shape: TypeAlias = tuple[Any, ...]


class PolicyKeys:
    """A policy's keys.

    A key is a (nested) tuple of numbers, texts or bytes of one shape: queues sort by it, so an
    incomparable key would fail others' steps.
    """

    def __init__(self, policy: SchedulePolicy, name: str) -> None:
        """name: for errors, with the distribution."""
        self._policy = policy
        self._name = name
        self._shape: _Shape | None = None

    def of(self, request: Request, *, alone: bool) -> tuple[Any, ...]:
        """Return a request's key. alone: nothing to compare with.

        Raises RequestFailed naming the policy.
        """
        try:
            key = self._policy.key(request)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise RequestFailed(f"{self._name} failed on this request: {reason}") from error
        if not isinstance(key, tuple):
            raise self._wrong(f"must be a tuple, got {type(key).__name__}")
        shape = self._shape_of(key)
        if alone:
            self._shape = shape
        elif shape != self._shape:
            raise self._wrong(f"{shown(key)} cannot be compared with other requests' keys")
        return key

    def _shape_of(self, key: tuple[Any, ...]) -> _Shape:
        shape: list[Any] = []
        for part in key:
            if isinstance(part, int | float):
                if isinstance(part, float) and math.isnan(part):  # isnan raises for a huge int.
                    raise self._wrong("has a part that is not a number (NaN)")
                shape.append("number")
            elif isinstance(part, str | bytes):
                shape.append(str if isinstance(part, str) else bytes)
            elif isinstance(part, tuple):
                shape.append(self._shape_of(part))
            else:
                raise self._wrong(
                    f"has a part of type {type(part).__name__}; there may be numbers, texts, "
                    "bytes and tuples of them"
                )
        return tuple(shape)

    def _wrong(self, what: str) -> RequestFailed:
        return RequestFailed(f"{self._name} failed on this request: its key {what}")
