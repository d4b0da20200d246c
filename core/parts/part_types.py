"""Turns parts' decoded data into structs again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ..step import StepPlan, StepResult
from . import (
    adapters,
    encoder_decoder,
    input_embeds,
    kv_compression,
    kv_transfer,
    rounds,
    routed_experts,
    speculation,
    states,
)


class SentTypes(NamedTuple):
    """Structs that a part sends; None: nothing."""

    plan: type[msgspec.Struct] | None = None
    """In `StepPlan.parts`."""
    result: type[msgspec.Struct] | None = None
    """In `StepResult.parts`."""
    start: type[msgspec.Struct] | None = None
    """In `SlotStart.parts`."""


BUILTIN: dict[str, SentTypes] = {
    adapters.NAME: SentTypes(plan=adapters.AdapterPlan, start=adapters.AdapterStart),
    encoder_decoder.NAME: SentTypes(
        plan=encoder_decoder.EncodePlan, start=encoder_decoder.SourceStart
    ),
    kv_compression.NAME: SentTypes(
        plan=kv_compression.CompactionPlan, result=kv_compression.CompactionResult
    ),
    kv_transfer.NAME: SentTypes(plan=kv_transfer.TransferPlan, result=kv_transfer.TransferResult),
    input_embeds.NAME: SentTypes(plan=input_embeds.InputEmbedsPlan, start=input_embeds.SlotItems),
    rounds.NAME: SentTypes(result=rounds.RoundResult),
    routed_experts.NAME: SentTypes(result=routed_experts.RoutedTokens),
    speculation.NAME: SentTypes(
        plan=speculation.DraftPlan, result=speculation.DraftResult, start=speculation.DraftStart
    ),
    states.NAME: SentTypes(plan=states.StatePlan),
}


class PartTypes:
    """Structs of all parts. Decoded plans and results have dictionaries instead, as plugins load
    later.
    """

    def __init__(self, others: Mapping[str, SentTypes] | None = None) -> None:
        """others: name → types, of external parts."""
        self._types = {**BUILTIN, **(others or {})}

    def plan(self, decoded: StepPlan) -> StepPlan:
        """Return a decoded plan with its structs. Raises msgspec.ValidationError for mismatches or
        unknown names.
        """
        starts = decoded.starts
        if any(start.parts for start in starts):
            starts = tuple(
                msgspec.structs.replace(start, parts=self._restored(start.parts, "start"))
                if start.parts
                else start
                for start in starts
            )
        if starts is decoded.starts and not decoded.parts:
            return decoded
        parts = self._restored(decoded.parts, "plan")
        return msgspec.structs.replace(decoded, starts=starts, parts=parts)

    def result(self, decoded: StepResult) -> StepResult:
        if not decoded.parts:
            return decoded
        return msgspec.structs.replace(decoded, parts=self._restored(decoded.parts, "result"))

    def _restored(self, parts: Mapping[str, Any], what: str) -> dict[str, Any]:
        restored = {}
        for name, value in parts.items():
            kind = getattr(self._types.get(name, SentTypes()), what)
            if kind is None:
                raise msgspec.ValidationError(f"no part {name!r} sends a {what}")
            restored[name] = msgspec.convert(value, kind)
        return restored
