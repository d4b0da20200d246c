"""Public names of the types that travel between event loop and worker; see `core/step.py`."""

from .step import (
    CompiledGrammar,
    GrammarStart,
    InProcess,
    KVDetached,
    KVReport,
    ReasoningGate,
    SlotStart,
    StepPlan,
    StepResult,
    TableWrite,
)

__all__ = [
    "CompiledGrammar",
    "GrammarStart",
    "InProcess",
    "KVDetached",
    "KVReport",
    "ReasoningGate",
    "SlotStart",
    "StepPlan",
    "StepResult",
    "TableWrite",
]
