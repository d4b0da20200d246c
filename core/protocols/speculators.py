"""The contract of speculators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import msgspec

if TYPE_CHECKING:
    import torch


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a speculator that has none."""


@dataclass(frozen=True)
class SpeculatorSetup:
    """Constructor argument of a speculator."""

    num_drafts: int
    """Drafts of a row at most (`num_speculative_tokens`)."""
    options: msgspec.Struct
    """An instance of the speculator's `options`."""
    vocab_size: int
    max_model_len: int
    num_slots: int
    """Rows of a call at most."""
    device: torch.device


class KnownTokens(NamedTuple):
    """The tokens of each row that is to get drafts. All on the device; R = num_rows."""

    history: torch.Tensor
    """[R or more, positions] int32: tokens by slot. Read-only, and undefined behind `lengths`."""
    slots: torch.Tensor
    """[R] int64"""
    lengths: torch.Tensor
    """[R] int64: row r's tokens, prompt and output, are `history[slots[r], :lengths[r]]`; at least
    one."""


class RequestText(NamedTuple):
    """What a speculator may know of a request that takes a slot. On the host."""

    slot: int
    num_tokens: int
    """Known tokens: the prompt, and what was generated before a preemption. The slot's history has
    them from the next `propose` on."""
    num_prompt_tokens: int
    sharing: int
    """62 bits. Text of a request may become drafts of those with the same number alone: others are
    other tenants' (`cache_salt`), or depend on other inputs."""
    prediction: tuple[int, ...] = ()
    """Tokens that the caller expects in the output."""


class Drafts(NamedTuple):
    """What a speculator proposes. R = num_rows, K = num_drafts."""

    token_ids: torch.Tensor
    """[R, K] int32 or int64: the tokens that are to follow each row's."""
    counts: torch.Tensor
    """[R] int32 or int64, 0 to K: the first so many of a row are drafts. A token that is not in the
    vocabulary ends them, too."""


class Speculator(ABC):
    """Proposes the tokens that follow a request's, so that one step verifies several. Subclass it.

    One instance serves an engine, on the launch thread. Drafts change how many tokens a step
    brings, never which: the model samples at each position, and a draft is accepted if it is the
    token that was sampled. To test a speculator: `jackfield.plugins.conformance.speculators`.
    """

    options: ClassVar[type[msgspec.Struct]] = NoOptions
    """Keys of `EngineConfig.speculative_config` that it reads besides `method` and
    `num_speculative_tokens`. Raise ValueError in `__post_init__` for values that contradict each
    other."""

    @abstractmethod
    def __init__(self, setup: SpeculatorSetup) -> None: ...

    @abstractmethod
    def propose(self, tokens: KnownTokens) -> Drafts:
        """Return drafts of each row, from its tokens alone.

        Called after each step, once its tokens are chosen, for requests that may have drafts.
        Launches work on the device and does not wait for it; the result may be overwritten by the
        next call.
        """

    def start(self, request: RequestText) -> None:  # noqa: B027
        """Note the request that takes a slot, before its first `propose`. Optional."""

    def release(  # noqa: B027
        self, tokens: KnownTokens, slot: int, num_tokens: int
    ) -> None:
        """Note that the request of a slot leaves it: it ended, or was preempted. Optional.

        tokens: its own, one row; num_tokens: an upper bound of their number, which only the device
        knows. Launches work and does not wait for it; once for each `start`.
        """
