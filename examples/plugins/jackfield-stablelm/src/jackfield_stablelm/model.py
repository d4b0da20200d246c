"""StableLM: layer norms with a bias, a quarter of each head rotated, blocks serial or parallel.

Source: the `StableLmForCausalLM` of `transformers`, and https://huggingface.co/stabilityai.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from jackfield.core.errors import ConfigError
from jackfield.core.loading.model_config import ModelConfig
from jackfield.core.loading.weight_map import Shard, WeightMap
from jackfield.core.nn.attention import Attention
from jackfield.core.nn.context import BuildContext, ForwardContext
from jackfield.core.nn.embedding import Embedding
from jackfield.core.nn.linear import GatedLinear, Linear, MergedLinear
from jackfield.core.nn.rotary import Rotary
from jackfield.core.protocols import AttentionSpec


def layer_norm(hf: Any, build: BuildContext) -> nn.LayerNorm:
    """Over the hidden size, with weight and bias."""
    return nn.LayerNorm(hf.hidden_size, hf.layer_norm_eps, device=build.device, dtype=build.dtype)


class StableLmAttention(nn.Module):
    """Grouped-query attention; the rotation's share of a head is `Rotary`'s business."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf, dim = config.hf_config, config.head_dim
        sizes = {
            "q": config.num_heads * dim,
            "k": config.num_kv_heads * dim,
            "v": config.num_kv_heads * dim,
        }
        self.qkv_proj = MergedLinear(hf.hidden_size, sizes, build, bias=hf.use_qkv_bias)
        self.o_proj = Linear(sizes["q"], hf.hidden_size, build)
        spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=dim,
            scale=dim**-0.5,
        )
        self.attention = Attention(spec, build)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        """residual + attention(x): [num_tokens, hidden_size] → the same shape."""
        heads = self.attention(self.qkv_proj(x), context, rotary=rotary)
        out: torch.Tensor = self.o_proj(heads, residual=residual)
        return out


class StableLmMLP(nn.Module):
    """residual + down(silu(gate(x)) * up(x))"""

    def __init__(self, hf: Any, build: BuildContext) -> None:
        super().__init__()
        self.gate_up_proj = GatedLinear(hf.hidden_size, hf.intermediate_size, build)
        self.down_proj = Linear(hf.intermediate_size, hf.hidden_size, build)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] → the same shape"""
        out: torch.Tensor = self.down_proj(self.gate_up_proj(x), residual=residual)
        return out


class StableLmBlock(nn.Module):
    """Attention and MLP, one after the other, or side by side over one norm."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        self.input_layernorm = layer_norm(hf, build)
        self.self_attn = StableLmAttention(config, build)
        self.mlp = StableLmMLP(hf, build)
        self.post_attention_layernorm = None
        if not hf.use_parallel_residual:
            self.post_attention_layernorm = layer_norm(hf, build)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] → the same shape; `hidden` may be overwritten."""
        x = self.input_layernorm(hidden)
        hidden = self.self_attn(x, hidden, rotary, context)
        if self.post_attention_layernorm is not None:
            x = self.post_attention_layernorm(hidden)
        out: torch.Tensor = self.mlp(x, hidden)
        return out


class StableLmModel(nn.Module):
    """Everything between token ids and the last norm."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        self.embed_tokens = Embedding(config.vocab_size, hf.hidden_size, build)
        self.rotary = Rotary(config, build)
        self.layers = nn.ModuleList(
            StableLmBlock(config, build) for _ in range(hf.num_hidden_layers)
        )
        self.norm = layer_norm(hf, build)

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens] → [num_tokens, hidden_size], not normed."""
        hidden: torch.Tensor = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, self.rotary, context)
        return hidden


class StableLmForCausalLM(nn.Module):
    """The decoder and its head. Module names are the checkpoint's, but for what is merged."""

    weight_map: ClassVar[WeightMap] = WeightMap(
        stacked={
            "q_proj": Shard("qkv_proj", "q"),
            "k_proj": Shard("qkv_proj", "k"),
            "v_proj": Shard("qkv_proj", "v"),
            "gate_proj": Shard("gate_up_proj", "gate"),
            "up_proj": Shard("gate_up_proj", "up"),
        },
        tied={"lm_head.weight": "model.embed_tokens.weight"},
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """Raises ConfigError for variants that are not done here."""
        super().__init__()
        hf = config.hf_config
        if hf.qk_layernorm:
            raise ConfigError("qk_layernorm: norms of each head are not done", param="qk_layernorm")
        if hf.hidden_act not in ("silu", "swish"):
            raise ConfigError(f"hidden_act: {hf.hidden_act!r} is not silu", param="hidden_act")
        self.model = StableLmModel(config, build)
        if not hf.tie_word_embeddings:
            self.lm_head = Embedding(config.vocab_size, hf.hidden_size, build)

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens] → [num_tokens, hidden_size]"""
        hidden: torch.Tensor = self.model(input_ids, context)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] → [num_rows, vocab_size]"""
        head: Embedding = getattr(self, "lm_head", self.model.embed_tokens)
        return head.logits(self.model.norm(hidden))
