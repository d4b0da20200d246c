"""MiMo: Qwen2, without the layers that predict further tokens."""

from __future__ import annotations

import dataclasses

from .qwen2 import Qwen2ForCausalLM


class MiMoForCausalLM(Qwen2ForCausalLM):
    weight_map = dataclasses.replace(Qwen2ForCausalLM.weight_map, ignored=("model.mtp_layers.",))
