"""The contract of speculators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..loading.model_config import ModelConfig
    from ..nn.context import ForwardContext


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a speculator that has none."""


@dataclass(frozen=True)
class DraftSite:
    """What a speculator's needs may depend on."""

    options: msgspec.Struct
    """An instance of the speculator's `options`."""
    num_drafts: int
    target: nn.Module
    """The model that is served, loaded; not to be changed."""
    target_config: ModelConfig
    draft_config: ModelConfig | None
    """Of the speculator's `checkpoint`; None: it has none."""
    load: Callable[..., nn.Module]
    """`load(config, architecture=None)`: a module, built from a `ModelConfig` and filled from its
    folder by the engine's loader. architecture: a class as `protocols.Model`, its `compute_logits`
    aside; None: the one registered for the configuration's architecture."""


class SpeculatorNeeds(NamedTuple):
    """What a speculator needs besides tokens."""

    model: nn.Module | None = None
    """Its own model. Layers of `core.nn` that attend join the engine's KV cache: they have keys
    and values in the blocks of each request, as long as those of the target's layers. Where caches
    are compacted, they keep the first tokens and the most recent ones."""
    hidden: bool = False
    """Whether it reads the target's last hidden states, after the final norm."""
    taps: tuple[int, ...] = ()
    """Layers of the target whose inputs it reads: 0 has the embeddings, i what i layers made of
    them."""
    longest: int | None = None
    """Longest sequence that its model reads: longer ones get no drafts. None: any."""


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
    hidden_size: int = 0
    """Of the target's states."""
    model: nn.Module | None = None
    """That of its `SpeculatorNeeds`."""


class ComputedTokens(NamedTuple):
    """The tokens that a step has computed, with their states. T = tokens, of prompts too."""

    token_ids: torch.Tensor
    """[T] int64"""
    next_ids: torch.Tensor
    """[T] int64: the token that follows each; of rejected drafts any."""
    positions: torch.Tensor
    """[T] int64"""
    hidden: torch.Tensor | None
    """[T, hidden_size], if needed."""
    taps: torch.Tensor | None
    """[T, number of taps * hidden_size], if needed: those of a token side by side."""
    context: ForwardContext
    """For a pass of the speculator's model over these tokens, at these positions."""


class DraftRows(Protocol):
    """The rows of one proposal, for speculators with weights. R = num_rows."""

    def positions(self, number: int) -> torch.Tensor:
        """Return [R] int64: `lengths - 1 + number`."""

    def context(self, number: int) -> ForwardContext:
        """Return the context of a pass of the speculator's model over one token per row, at
        `positions(number)`. Number 0 is the newest token; each number is one pass, in order."""

    def choose(self, logits: torch.Tensor, number: int) -> torch.Tensor:
        """Choose the token for position `lengths + number` as the target would, with the noise that
        it samples with: logits [R, tokens], of the vocabulary's first tokens → [R] int64.

        With `rejection_sample_method` standard it draws from the logits' own distribution, which
        then decides about the draft: the drafts must be the tokens that were drawn, and how many a
        row has must not depend on which."""


class KnownTokens(NamedTuple):
    """The tokens of each row that is to get drafts. All on the device; R = num_rows."""

    history: torch.Tensor
    """[R or more, positions] int32: tokens by slot. Read-only, and undefined behind `lengths`."""
    slots: torch.Tensor
    """[R] int64"""
    lengths: torch.Tensor
    """[R] int64: row r's tokens, prompt and output, are `history[slots[r], :lengths[r]]`; at least
    one."""
    hidden: torch.Tensor | None = None
    """[R, hidden_size] The target's last hidden state of the token before the newest, if needed:
    what the newest token was chosen from."""
    rows: DraftRows | None = None
    """Set by the engine for speculators with `SpeculatorNeeds`."""
    states: torch.Tensor | None = None
    """[R, any size] What `observe` has returned of the token before the newest."""


PROMPT_END = 16


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
    prompt_end: tuple[int, ...] = ()
    """The prompt's last tokens, `PROMPT_END` of them at most."""
    prediction: tuple[int, ...] = ()
    """Tokens that the caller expects in the output; () if it says nothing."""


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
    """Keys of `EngineConfig.speculative_config` that it reads besides those of every method. Raise
    ValueError in `__post_init__` for values that contradict each other."""
    recordable: ClassVar[bool] = True
    """Whether `observe` and `propose` of a speculator with `SpeculatorNeeds` may be recorded as a
    CUDA graph, and replayed in place of later calls: they launch work whose kinds and sizes depend
    on the shapes of their arguments alone, do not wait for the device, and hand each other nothing
    but the states that `observe` returns."""
    checkpoint: ClassVar[Literal["none", "draft", "target"]] = "none"
    """Where its weights are: "draft", in a checkpoint of its own, `speculative_config.model`;
    "target", in the served one, unless `model` names another."""

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> int:
        """Return how surely a draft checkpoint is this speculator's, from its config.json: 0, it is
        not; 1, it may be; 2, it is. The surest is chosen where no method is named."""
        return 0

    @classmethod
    def carried_by(cls, config: Mapping[str, Any]) -> bool:
        """Return whether a served checkpoint with this config.json has the speculator's weights, so
        that `"method": "auto"` chooses it."""
        return False

    @classmethod
    def default_drafts(cls, config: Mapping[str, Any]) -> int | None:
        """Return `num_speculative_tokens` of a checkpoint, from its config.json, where it is not
        set; None: it must be."""
        return None

    @classmethod
    def overrides(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return fields of a draft checkpoint's config.json that the engine reads elsewhere, or by
        other names (`model_type`, `architectures`, sizes), from what the file has."""
        return {}

    @classmethod
    def needs(cls, site: DraftSite) -> SpeculatorNeeds:
        """Return what it needs besides tokens; called once, before the constructor. Raises
        ConfigError for a checkpoint or a target that it does not serve."""
        return SpeculatorNeeds()

    @classmethod
    def tapped_layers(cls, site: DraftSite) -> tuple[int, ...]:
        """Return `SpeculatorNeeds.taps`, in stages that do not have its model (`site.load` raises)
        and pass the inputs of their layers on. Without it, such needs are refused in several
        stages."""
        return ()

    @abstractmethod
    def __init__(self, setup: SpeculatorSetup) -> None: ...

    def observe(self, step: ComputedTokens) -> torch.Tensor | None:
        """Read what a step has computed: called after every step of a speculator with needs, before
        `propose`, once the step's tokens are chosen. For models whose layers attend: run over all
        tokens, so that their cache is as long as the target's.

        Return states of the tokens, [T, any size], for `KnownTokens.states`; None: there are none.
        """
        return None

    @abstractmethod
    def propose(self, tokens: KnownTokens) -> Drafts:
        """Return drafts of each row.

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
