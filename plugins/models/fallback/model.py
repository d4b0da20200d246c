"""`TransformersLM`: a causal model of `transformers` without a family here."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from ....core.errors import ConfigError
from ....core.loading.model_config import ModelConfig
from ....core.loading.weight_map import WeightMap
from ....core.nn.context import BuildContext, ForwardContext
from ....core.protocols.field_kinds import INTEGER, NUMBER, SIZE, TEXT, FieldKind
from ..expert_fields import DEEPSEEK_EXPERTS, SPARSE_LAYERS
from ..latent import LATENT
from ..windows import QWEN_WINDOWS
from .attention import NAME, HeadsAttention, OwnValues, Probe, refused
from .build import Ropes, allocate, base_name, empty_model, model_class, windows
from .modules import TensorPlan, place_modules
from .weights import ModuleWeightMap

logger = logging.getLogger("jackfield.loading")

BY_PLACE = frozenset({"Llama4ForCausalLM", "PhimoeForCausalLM"})
"""Unsupported models that `after_loading` does not detect, as only long texts would show it."""
MEETING = 0.05
"""Relative difference of states above which tokens interact outside attention."""


class TransformersLM(nn.Module):
    """Runs transformers' modules over this engine's cache and scheduling.

    They see a step as one sequence [1, num_tokens] with any positions; only attention knows which
    tokens belong together. Products and experts are replaced, for quantization and ranks; weights
    keep their checkpoint names. If modules read device values, the first recording fails, and steps
    are launched.
    """

    tensor_parallel = True
    weight_map: WeightMap = WeightMap()
    config_fields: ClassVar[Mapping[str, FieldKind]] = {
        **DEEPSEEK_EXPERTS,
        **SPARSE_LAYERS,
        **LATENT,
        **QWEN_WINDOWS,
        "final_logit_softcapping": NUMBER,
        "hidden_activation": TEXT,
        "n_head": INTEGER,
        "n_layer": INTEGER,
        "shared_expert_intermediate_size": SIZE,
    }
    """Fields that many of transformers' models have."""

    @classmethod
    def refusal(cls, architecture: str) -> str | None:
        """Return why the architecture is not served, in one clause; None if it may be."""
        if model_class(architecture) is None:
            return "transformers has no causal model of that name"
        if architecture in BY_PLACE:
            return "its modules look at a token's place in the step, or at the step's longest text"
        return None

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        model = empty_model(config)
        experts_kind = getattr(model.config, "_experts_implementation", None)
        ropes = Ropes(model, config.max_model_len)
        self._base = base_name(model)
        plan = TensorPlan(model.config, self._base, build)
        head = model.get_output_embeddings()
        products, experts = place_modules(model, head, plan, build)
        self.hf = model
        self.weight_map = ModuleWeightMap.of(model, products, experts)
        probe = Probe()
        # What others compute per expert cannot run on "meta".
        model.config._experts_implementation = "batched_mm"
        try:
            self._states(torch.zeros(2, dtype=torch.int64, device="meta"), probe)
        except ConfigError:
            raise
        except Exception as error:  # Modules of any kind stumble over anything.
            raise refused(f"its modules do not run without values ({error})") from error
        model.config._experts_implementation = experts_kind
        self._add_layers(probe, config, build)
        allocate(model, build)
        ropes.fill()
        # Not a submodule: its parts are those of `hf`, but for the layers below the head.
        self._head = (_head_of(model, self._base),)
        self._device, self._ranks = build.device, build.ranks
        logger.info(
            "model: %s runs on transformers' modules (the fallback): attention, cache and "
            "scheduling are Jackfield's; norms, rotations and activations are kernels of their "
            "own, so that steps take longer than with a family of Jackfield's; they are recorded "
            "as CUDA graphs where its modules ask the device for no values",
            config.architecture,
        )

    def _add_layers(self, probe: Probe, config: ModelConfig, build: BuildContext) -> None:
        """Attach a layer to each module that calls attention."""
        expected = windows(self.hf.config, config.num_layers)
        if len(probe.calls) != config.num_layers:
            raise refused(
                f"{len(probe.calls)} of its {config.num_layers} layers are attention over keys and "
                "values"
            )
        for (module, (spec, value_dim)), window in zip(probe.calls.items(), expected, strict=True):
            if (
                spec.sliding_window is None
                and window is not None
                and (window < config.max_model_len)
            ):
                raise refused("only masks tell its layers' windows")
            setattr(module, NAME, HeadsAttention(spec, value_dim, build))

    def _states(self, input_ids: torch.Tensor, step: Any, positions: Any = None) -> torch.Tensor:
        if positions is None:
            positions = torch.zeros_like(input_ids)
        out = getattr(self.hf, self._base)(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False,
            **{NAME: step},
        )  # fmt: skip
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        if context.precompiling:
            # No kernel has run then, and its modules may look at values.
            shape = len(input_ids), self.hf.config.hidden_size
            dtype = self.hf.get_input_embeddings().weight.dtype
            return torch.zeros(shape, dtype=dtype, device=input_ids.device)
        return self._states(input_ids, context, context.positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head[0](inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    @torch.inference_mode()
    def after_loading(self) -> None:
        """Raise ConfigError if tokens interact outside attention, or depend on their place in a
        step: then another order of tokens and positions gives other states.
        """
        tokens = torch.arange(4, device=self._device) % self.hf.config.vocab_size
        positions = torch.tensor([5, 2, 0, 3], device=self._device)
        order = torch.tensor([2, 0, 3, 1], device=self._device)
        with self._ranks.pause():
            states = self._states(tokens, OwnValues(), positions)
            others = self._states(tokens[order], OwnValues(), positions[order])
        difference = (states[order] - others).float().norm() / states.float().norm()
        if float(difference) > MEETING:
            raise refused("its tokens meet outside attention, or have no positions of their own")


class _GivenStates(nn.Module):
    """Replaces all layers below a head; returns its input."""

    def forward(
        self, *inputs: Any, inputs_embeds: torch.Tensor, **options: Any
    ) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


def _head_of(model: Any, base: str) -> Any:
    """Return a causal model that shares all of `model` but the layers: it maps states to logits."""
    head = copy.copy(model)
    head._modules = {**model._modules, base: _GivenStates()}
    return head
