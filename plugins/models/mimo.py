"""MiMo: Qwen2, with layers in the checkpoint that predict further tokens and are not loaded."""

from __future__ import annotations

import dataclasses

from .qwen2 import Qwen2ForCausalLM


class MiMoForCausalLM(Qwen2ForCausalLM):
    tensor_parallel = True
    weight_map = dataclasses.replace(Qwen2ForCausalLM.weight_map, ignored=("model.mtp_layers.",))
