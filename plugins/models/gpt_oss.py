"""GPT-OSS: a mixture in every layer, attention sinks, and windows alternating with full
attention.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import StackedExperts
from ...core.nn.activations import ClampedSwiGLU
from ...core.nn.context import BuildContext
from ...core.protocols.field_kinds import NUMBER
from .decoder import CausalLM
from .expert_fields import EXPERTS
from .parts import renormalized_mixture
from .windows import SinkAttention

GATE_UP = ("gate", "up")


class GptOssForCausalLM(CausalLM):
    config_fields = EXPERTS | {"swiglu_limit": NUMBER}
    attention = SinkAttention
    weight_map = dataclasses.replace(
        CausalLM.weight_map,
        stacked={
            part: CausalLM.weight_map.stacked[part] for part in ("q_proj", "k_proj", "v_proj")
        },
        names={"gate": "router"},
        together={
            "gate_up_proj": StackedExperts("gate_up_proj.weight", GATE_UP, transposed=True),
            "down_proj": StackedExperts("down_proj.weight", transposed=True),
            **{
                f"{layer}_{stored}": StackedExperts(f"{layer}.{tensor}", names)
                for layer, names in (("gate_up_proj", GATE_UP), ("down_proj", ("",)))
                # The last two are those of published checkpoints, in mxfp4.
                for stored, tensor in (("bias", "bias"), ("blocks", "blocks"), ("scales", "scales"))
            },
        },
    )

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        """Softmax over the chosen experts equals a renormalized softmax over all."""
        hf = config.hf_config
        return renormalized_mixture(
            hf,
            build,
            bias=True,
            clamped=ClampedSwiGLU(
                alpha=_positive(hf, "swiglu_alpha", 1.702),
                limit=_positive(hf, "swiglu_limit", 7.0),
            ),
        )


def _positive(hf: Any, field: str, default: float) -> float:
    value = getattr(hf, field, None)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{field}: must be a positive number, got {value!r}", param=field)
    return float(value)
