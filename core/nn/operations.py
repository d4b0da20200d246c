"""What models and steps compute outside attention, in plain torch: the reference, for any device.

`Operations` is put together from parts: `core/nn/layer_operations/` has what most layers call,
`core/nn/latent/` and `core/nn/state/` what layers of their kinds call, `core/nn/step_operations/`
what a step needs besides its layers. Blocks call them through `BuildContext.operations`. A plugin
that registers a subclass (`register_operations`) replaces as many as it has better code for; the
others stay as here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch

from ..old_names import adopt_overrides
from .latent.index_operations import IndexOperations
from .latent.operations import LatentOperations
from .layer_operations.experts import ExpertOperations
from .layer_operations.heads import HeadLayout, HeadOperations
from .layer_operations.products import CenteredNorm, Norm, NormSums, PositionRows
from .state.operations import StateOperations
from .step_operations.adapters import AdapterOperations
from .step_operations.compaction import CompactionOperations
from .step_operations.drafts import DraftOperations
from .step_operations.inputs import InputOperations
from .step_operations.sampling import SamplingOperations

__all__ = [
    "CenteredNorm", "HeadLayout", "Norm", "NormSums", "Operations", "PositionRows", "Precompiler",
]  # fmt: skip


class Precompiler(Protocol):
    """A period in which kernels are compiled and not launched."""

    def lacks(self, configuration: str) -> bool:
        """Whether kernels besides those requested so far may have to be compiled: one of these had
        to be, or no period in which all of this configuration's were requested has ended well on
        this host. `configuration`: what decides which kernels steps launch."""


class Operations(
    HeadOperations,
    ExpertOperations,
    LatentOperations,
    IndexOperations,
    StateOperations,
    InputOperations,
    SamplingOperations,
    CompactionOperations,
    DraftOperations,
    AdapterOperations,
):
    """T = num_tokens. Weights are [out_features, in_features].

    Results are of the input's type. An argument is overwritten only if its method says so, and a
    row of a result does not depend on the other rows. Conformance tests for subclasses:
    `jackfield.plugins.conformance.operations`.
    """

    name: ClassVar[str] = "torch"
    features: ClassVar[frozenset[str]] = frozenset({
        "cached_heads.quantized", "write_cache.quantized",
        "decode_inputs.dropped", "step_inputs.dropped",
        "linear.factor", "linear.layer_norm", "activated_linear.layer_norm",
        "gated_linear.layer_norm",
        "bidirectional_attention.distance_bias", "experts.activation", "experts.bias",
        "experts.foreign", "experts.gelu", "experts.limit", "experts.no_residual", "experts.relu2",
        "gated_rms_norm.sigmoid",
        "route.bias", "route.factor", "route.first", "route.groups", "route.sigmoid",
    })  # fmt: skip
    """Options of methods that these operations support, as "method.option"; a model or an engine
    that needs another one is refused. A subclass that overrides such a method sets it; without
    that, it supports none of the method's options, so that an override never ignores one that is
    newer."""

    batch_invariant: ClassVar[bool] = False
    """Whether a row of each result has the same bits whatever the other rows, and however many they
    are (`EngineConfig.batch_invariant`): of layers that attend to keys and values, of mixtures of
    experts, and of sampling."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        adopt_overrides(cls)
        if "features" not in vars(cls):
            cls.features = frozenset(
                name for name in cls.features if name.partition(".")[0] not in vars(cls)
            )

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return None if the operations run on this device, else the reason, in one clause."""
        return None

    @classmethod
    def initialize_device(cls, device: torch.device) -> None:
        """Do slow initialisation that needs no model: called at start, on any thread, before others
        use the device. A step that fails here is repeated when it is needed."""

    def precompile(self, device: torch.device) -> AbstractContextManager[Precompiler] | None:
        """Return a context in which this thread's kernel launches only request compilation, and
        whose exit waits for all compilations; None: these operations compile nothing.

        Tensors that kernels would have written have the right shape and undefined contents. Other
        kernels (torch's) run as usual, on such contents.
        """
        return None

    def num_loaded(self) -> int:
        """Return the number of kernels compiled or loaded in this process so far; a step that
        increases it was delayed by that."""
        return 0
