"""Agreement between ranks on the result of their start."""

from __future__ import annotations

from ...core.errors import JackfieldError, RankFailed
from ...core.protocols.executors import ExecutorInfo

NO_ATTENTION = "none"
"""`ExecutorInfo.attention_backend` of a stage without attention."""
ALIKE = (
    "num_blocks",
    "max_model_len",
    "num_snapshots",
    "cache_groups",
    "dtype",
    "attention_backend",
    "steps_in_flight",
)
"""Fields of ExecutorInfo that all ranks share."""


def remoteness(error: BaseException) -> int:
    """Return how far a start error may be from its cause."""
    if isinstance(error, RankFailed):
        return 0
    return 1 if isinstance(error, JackfieldError) else 2


def check_alike(rank: str, info: ExecutorInfo, own: ExecutorInfo) -> None:
    """Raise RankFailed if a rank's decisions differ from rank 0's."""
    backends = info.attention_backend, own.attention_backend
    for name in ALIKE:
        if name == "attention_backend" and NO_ATTENTION in backends:
            continue  # No layer of that stage attends.
        if (there := getattr(info, name)) != (here := getattr(own, name)):
            raise RankFailed(f"{rank} has {name} {there!r}, and rank 0 {here!r}")
