"""The contract of logits processors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..sampling_params import SamplingParams
from ..step import SlotStart

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LogitsProcessorSetup:
    """Constructor argument of a logits processor."""

    vocab_size: int
    num_slots: int
    """Slots are 0 to num_slots - 1."""
    max_model_len: int
    device: torch.device
    history: torch.Tensor
    """[num_slots or more, positions] int32 on `device`: the tokens of each slot. Read-only, and
    valid only in `apply`."""


@dataclass(frozen=True)
class ProcessedRows:
    """The rows of a step that a processor changes."""

    slots: tuple[int, ...]
    """[num_rows] Each once, unless the processor is `stateless`."""
    device_slots: torch.Tensor
    """[num_rows] int64, the slots on the device"""
    lengths: torch.Tensor
    """[num_rows] int64 on the device: tokens known, so that row r's are
    `history[device_slots[r], :lengths[r]]`."""


class LogitsProcessor(ABC):
    """Changes the logits of requests that use it, before sampling. Subclass it.

    One instance serves an engine; all but `check` runs on the launch thread. Requests use it by
    `SamplingParams.extra_args` (over HTTP: `vllm_xargs`). An error ends only the requests that were
    being served, and names the distribution. Rows of other requests are never passed to it, and
    cost nothing. To test a processor: `jackfield.plugins.conformance.logits_processors`.
    """

    parameters: ClassVar[frozenset[str]] = frozenset()
    """Keys of `extra_args` that it reads. A key that no active processor reads is refused."""
    examples: ClassVar[tuple[dict[str, Any], ...]] = ()
    """Several different `extra_args` that use it, for the conformance kit."""
    argmax_invariant: ClassVar[bool] = False
    """Whether it never changes which logit is the largest. If so, it is applied after the
    temperature and before min_p, top_k and top_p, and greedy rows are left out. Others are applied
    after logit_bias, allowed tokens, bad words and min_tokens, and before the penalties."""

    stateless: ClassVar[bool] = False
    """Whether what `apply` does to a row is decided by the request and the row's tokens alone
    (`history` up to `lengths`), not by earlier calls. If so, its requests get drafts (speculative
    decoding): a call may have several rows of a slot, each with its own length, and tokens that it
    has seen may be dropped. Requests of other processors get none."""

    @classmethod  # noqa: B027
    def check(cls, params: SamplingParams) -> None:
        """Validate a request, on the event loop. Raises InvalidRequest with the field's name."""

    @abstractmethod
    def __init__(self, setup: LogitsProcessorSetup) -> None: ...

    @abstractmethod
    def start(self, slot: int, request: SlotStart) -> bool:
        """Start a request in a slot: → whether the request uses this processor. After a preemption
        it is started again, maybe in another slot, with the tokens known so far."""

    def end(self, slot: int) -> None:  # noqa: B027
        """Release a slot: its request has ended or was preempted."""

    def batch_changed(self, slots: tuple[int, ...]) -> None:  # noqa: B027
        """Handle a change of rows: those of the next `apply` differ from the last ones, or in
        order."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        """logits: [num_rows, vocab_size] float32, may be changed in place → the same shape.

        Changes the rows in `rows`, on the device, and without waiting for it: kernels launched here
        run after the forward pass.
        """
