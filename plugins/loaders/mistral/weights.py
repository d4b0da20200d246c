"""Loads Mistral's consolidated*.safetensors: Mistral's names, and queries and keys in its
rotation's order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ....core.config import EngineConfig
from ....core.errors import LoadError
from ....core.loading.model_config import ModelConfig
from ....core.loading.weight_map import ParameterFiller, RowOrder, TensorFile
from ....core.nn.latent.layer import LatentAttention
from ..files import Bar, Layout, files_of

SINGLE = "consolidated.safetensors"
LAYOUT = Layout(SINGLE, f"{SINGLE}.index.json", ("consolidated*.safetensors",))
PREFIXES = {
    "mm_whisper_embeddings.tok_embeddings.": "model.embed_tokens.",
    "tok_embeddings.": "model.embed_tokens.",
    "output.": "lm_head.",
    "norm.": "model.norm.",
    "layers.": "model.layers.",
}
"""Name prefix → prefix in `transformers`' checkpoints."""
ENCODERS = (
    "vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.",
    "mm_whisper_embeddings.", "mm_streams_embeddings.",
)  # fmt: skip
"""Name prefixes of image and sound encoders, which are not loaded."""
MIXTURE = re.compile(r"^(layers\.\d+)\.feed_forward\.(gate|experts)\.")
"""A mixture of experts in place of an MLP."""
BESIDE_ATTENTION = re.compile(r"^(layers\.\d+)\.(gate|experts|shared_experts)\.")
"""A mixture whose parts are the layer's own, in models with latent attention."""
PARTS = {
    "attention": "self_attn", "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "feed_forward": "mlp",
    "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj",
    "wq_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "wq_b": "q_b_proj",
    "wkv_a_with_mqa": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj",
    "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
    "qscale_act": "input_scale", "qscale_weight": "weight_scale",
}  # fmt: skip
"""Dotted part of a name → part in `transformers`' checkpoints."""
CACHE_SCALES = {
    f"{letter}_fake_quantizer.qscale_act": f"{letter}_scale" for letter in "qkv"
} | {"kv_fake_quantizer.qscale_act": "kv_scale"}  # fmt: skip
TURNED = re.compile(r"\.self_attn\.[qk]_proj\.")
"""Tensors with rows in the order of Mistral's rotation, which pairs neighbouring channels; here,
halves are paired."""


def usual_name(name: str) -> str | None:
    """Return a tensor's name in `transformers`' checkpoints; None for encoders."""
    in_mixture = MIXTURE.match(name)
    name = MIXTURE.sub(r"\1.block_sparse_moe.\2.", name)
    name = BESIDE_ATTENTION.sub(r"\1.mlp.\2.", name)
    start = next((start for start in PREFIXES if name.startswith(start)), "")
    if not start and name.startswith(ENCODERS):
        return None
    name = PREFIXES.get(start, "") + name.removeprefix(start)
    for old, new in CACHE_SCALES.items():
        name = name.replace(f".{old}", f".{new}")
    # Mixtral has kept the names of the projections of an expert.
    kept = ("w1", "w2", "w3") if in_mixture else ()
    return ".".join(part if part in kept else PARTS.get(part, part) for part in name.split("."))


class MistralLoader:
    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        self.folder = model_config.path
        self.head_dim = model_config.head_dim

    def load(self, model: nn.Module, device: torch.device) -> None:
        filler = ParameterFiller(model, model.weight_map)  # type: ignore[arg-type]
        latent = any(isinstance(module, LatentAttention) for module in model.modules())
        order = None if latent else RowOrder.halves(self.head_dim)
        files = files_of(self.folder, LAYOUT, "use load_format=safetensors for other names")
        with Bar.of(files) as bar:
            for file in files:
                try:
                    with safe_open(file, framework="pt", device=str(device)) as tensors:
                        self._fill(filler, tensors, file.name, order)
                except (SafetensorError, OSError) as error:
                    raise LoadError(f"{file.name} is not a safetensors file: {error}") from error
                bar.add(file.stat().st_size)
        filler.finish()

    def _fill(
        self, filler: ParameterFiller, tensors: Any, file: str, order: RowOrder | None
    ) -> None:
        names: dict[str, str] = {}
        for name in tensors.keys():
            if (usual := usual_name(name)) is None:
                continue
            if usual in names:
                raise LoadError(f"{file}: {names[usual]} and {name} are the same tensor")
            names[usual] = name
        usual_file = _UsualFile(tensors, names, order)
        for usual, name in names.items():
            try:
                filler.fill_from(usual_file, usual)
            except LoadError as error:
                raise LoadError(f"{file}: {name}: {error.message}") from error


class _UsualFile:
    """Presents Mistral's file with `transformers`' names and rows."""

    def __init__(self, file: TensorFile, names: Mapping[str, str], order: RowOrder | None) -> None:
        """names: usual name → name in the file."""
        self.file, self.names, self.order = file, names, order

    def get_tensor(self, name: str, /) -> torch.Tensor:
        tensor = self.file.get_tensor(self.names[name])
        if self.order is None or TURNED.search(name) is None:
            return tensor
        return self.order.apply(name, tensor)

    def get_slice(self, name: str, /) -> Any:
        return self.file.get_slice(self.names[name])
