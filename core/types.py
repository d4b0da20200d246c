"""Public names of the types that travel between event loop and worker; see `core/step.py`."""

from .parts.adapters import AdapterLoad, AdapterPlan, AdapterStart
from .parts.encoder_decoder import EncodeItem, EncodePlan
from .parts.kv_compression import Compaction, CompactionPlan
from .parts.kv_transfer import KVDetached, KVReport, TransferPlan, TransferResult
from .parts.speculation import DraftPlan, DraftResult, DraftStart, Rejection
from .parts.states import StateCopy, StatePlan
from .step import (
    CompiledGrammar,
    GrammarStart,
    InProcess,
    ModelFingerprint,
    PartPlan,
    Ping,
    PrepareAhead,
    ReasoningGate,
    Recover,
    SlotStart,
    StepPlan,
    StepResult,
    TableWrite,
    TokenLogprobs,
    WorkerJob,
)

__all__ = [
    "AdapterLoad",
    "AdapterPlan",
    "AdapterStart",
    "Compaction",
    "CompactionPlan",
    "CompiledGrammar",
    "DraftPlan",
    "DraftResult",
    "DraftStart",
    "EncodeItem",
    "EncodePlan",
    "GrammarStart",
    "InProcess",
    "KVDetached",
    "KVReport",
    "ModelFingerprint",
    "PartPlan",
    "Ping",
    "PrepareAhead",
    "ReasoningGate",
    "Recover",
    "Rejection",
    "SlotStart",
    "StateCopy",
    "StatePlan",
    "StepPlan",
    "StepResult",
    "TableWrite",
    "TokenLogprobs",
    "TransferPlan",
    "TransferResult",
    "WorkerJob",
]
