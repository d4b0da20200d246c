"""Names of tensors in Mistral's own checkpoints, of latent attention and mixtures."""

from __future__ import annotations

import re

from ...core.loading.weight_map import WeightMap
from .latent import LATENT_MAP


class MistralWeightMap(WeightMap):
    """Tensors by the usual names, or by those of Mistral's own checkpoints."""

    def renamed(self, name: str) -> str:
        own = re.sub(r"^layers\.(\d+)\.(gate|(?:shared_)?experts)\.", r"layers.\1.mlp.\2.", name)
        return super().renamed(own)


PARTS = {
    "attention": "self_attn", "attention_norm": "input_layernorm", "wq": "q_proj",
    "wq_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "wq_b": "q_b_proj",
    "wkv_a_with_mqa": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj",
    "wo": "o_proj", "ffn_norm": "post_attention_layernorm", "feed_forward": "mlp",
    "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "qscale_act": "input_scale",
    "qscale_weight": "weight_scale",
}  # fmt: skip
PREFIXES = {"tok_embeddings.": "model.embed_tokens.", "output.": "lm_head."}
IMAGES = ("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.")
"""Starts of names of what reads images, which is not loaded."""
MISTRAL_MAP = MistralWeightMap(
    stacked=LATENT_MAP.stacked,
    tied=LATENT_MAP.tied,
    prefixes={**LATENT_MAP.prefixes, **PREFIXES},
    parts=PARTS,
)
