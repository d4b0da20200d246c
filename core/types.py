"""Public names of the types that travel between event loop and worker; see `core/step.py`."""

from .step import (
    CompiledGrammar,
    GrammarStart,
    InProcess,
    KVDetached,
    KVReport,
    ModelFingerprint,
    Ping,
    PrepareAhead,
    ReasoningGate,
    Recover,
    SlotStart,
    StepPlan,
    StepResult,
    TableWrite,
    WorkerJob,
)

__all__ = [
    "CompiledGrammar",
    "GrammarStart",
    "InProcess",
    "KVDetached",
    "KVReport",
    "ModelFingerprint",
    "Ping",
    "PrepareAhead",
    "ReasoningGate",
    "Recover",
    "SlotStart",
    "StepPlan",
    "StepResult",
    "TableWrite",
    "WorkerJob",
]
