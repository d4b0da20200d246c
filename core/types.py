"""Public names of the types that travel between event loop and worker; see `core/step.py`."""

from .step import KVDetached, KVReport, SlotStart, StepPlan, StepResult, TableWrite

__all__ = ["KVDetached", "KVReport", "SlotStart", "StepPlan", "StepResult", "TableWrite"]
