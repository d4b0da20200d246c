"""EAGLE: a head of one layer, which goes on from the target's last hidden states.

h' = layer(fc(embed(next token) ‖ h)), and the target's own head on h'. (Li, Wei, Zhang, Zhang 2024,
arXiv 2401.15077; checkpoints as vLLM reads them.) Of a token the head reads the state and the token
that follows, so its drafts begin one token earlier than a model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ...core.config.speculative_config import FIELD
from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard, WeightMap
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.embedding import Embedding
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.mlp import GatedMLP
from ...core.nn.norm import RMSNorm, norm_eps
from ...core.nn.rotary import Rotary
from ...core.protocols.speculators import (
    ComputedTokens,
    Drafts,
    DraftSite,
    KnownTokens,
    Speculator,
    SpeculatorNeeds,
    SpeculatorSetup,
)
from ..models.blocks import SelfAttention
from ..models.decoder import QKV_SHARDS

STACKED = {
    **QKV_SHARDS,
    "gate_proj": Shard("gate_up_proj", "gate"),
    "up_proj": Shard("gate_up_proj", "up"),
}
STRETCHED = ("default", "linear", "dynamic", "llama3", "proportional")
"""Types of rope whose angles do not depend on the longest position."""


class HeadAttention(SelfAttention):
    """Attention whose input may be wider than its output, with biases if the checkpoint has any."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext, width: int) -> None:
        super().__init__(config, layer, build)
        if width != config.hidden_size:
            sizes = {
                "q": config.num_heads * self.head_dim,
                "k": config.num_kv_heads * self.head_dim,
                "v": config.num_kv_heads * self.head_dim,
            }
            self.qkv_proj = MergedLinear(
                width, sizes, build, bias=True, shard="out",
                shares=self.own.rows(self.head_dim),
            )  # fmt: skip
        if str(config.hf_config.model_type).startswith("qwen3"):
            eps = norm_eps(config.hf_config, RMSNorm)
            self.q_norm = RMSNorm(self.head_dim, eps, build)
            self.k_norm = RMSNorm(self.head_dim, eps, build)

    @staticmethod
    def qkv_bias(hf: object) -> bool:
        return True

    @staticmethod
    def output_bias(hf: object) -> bool:
        return True


class HeadLayer(nn.Module):
    """A Llama layer after fc; the first has no input norm."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        self.self_attn = HeadAttention(config, layer, build, config.hidden_size)
        self.input_layernorm = (
            RMSNorm(hf.hidden_size, norm_eps(hf, RMSNorm), build) if layer else None
        )
        self.post_attention_layernorm = RMSNorm(hf.hidden_size, norm_eps(hf, RMSNorm), build)
        self.mlp = GatedMLP(hf.hidden_size, hf.intermediate_size, hf.hidden_act, build)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        hidden = self.self_attn(hidden, self.input_layernorm, rotary, context)
        out: torch.Tensor = self.mlp(hidden, self.post_attention_layernorm)
        return out


class Head(nn.Module):
    """What EAGLE's heads have in common: embeddings and a head, their own or the target's."""

    tensor_parallel: ClassVar[bool] = True
    layer: ClassVar[type[nn.Module]] = HeadLayer
    weight_map = WeightMap(stacked=STACKED)
    optional: ClassVar[tuple[str, ...]] = ("embed_tokens.weight", "lm_head.weight")
    absent: frozenset[str] = frozenset()
    """Parameters that the checkpoint does not have."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        self.embed_tokens: Any = Embedding(
            config.vocab_size, hf.hidden_size, build, shard="vocabulary"
        )
        self.lm_head: Any = Embedding(
            self.num_drafted(config), hf.hidden_size, build, shard="vocabulary"
        )
        self.logits_factor = 1.0
        self.rotary = Rotary(config, build)
        self.layers = nn.ModuleList(
            self.layer(config, layer, build) for layer in range(config.num_layers)
        )
        biases = (name for name, _ in self.named_parameters() if name.endswith(".bias"))
        self.weight_map = replace(self.weight_map, optional=(*self.optional, *biases))

    @staticmethod
    def num_drafted(config: ModelConfig) -> int:
        """Return the size of the vocabulary that is drafted."""
        return config.vocab_size

    def after_loading(self) -> None:
        """Leave out the biases that the checkpoint does not have."""
        for name, module in self.named_modules():
            if isinstance(module, Linear) and f"{name}.bias" in self.absent:
                module.bias = None

    def share(self, target: Any) -> None:
        """Use the target's embeddings and head where the checkpoint has none."""
        decoder = getattr(target, "model", None)
        for name, module in (
            ("embed_tokens", getattr(decoder, "embed_tokens", None)),
            ("lm_head", getattr(target, "output_embeddings", None)),
        ):
            if f"{name}.weight" not in self.absent:
                continue
            own = getattr(self, name).weight.shape
            if not isinstance(module, Embedding) or module.weight.shape != own:
                raise ConfigError(
                    f"{FIELD}: the checkpoint has no {name}, and the served model has none of its "
                    "shape here (its last stage has no embeddings: pipeline_parallel_size)",
                    param=FIELD,
                )
            setattr(self, name, module)
            if name == "lm_head":
                self.logits_factor = float(getattr(target, "logits_factor", 1.0))


class EagleHead(Head):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf = config.hf_config
        super().__init__(config, build)
        self.fc = Linear(2 * hf.hidden_size, hf.hidden_size, build, bias=True)
        self.weight_map = replace(
            self.weight_map, optional=(*self.weight_map.optional, "fc.bias"),
            prefixes={"model.": ""},
        )  # fmt: skip

    def forward(
        self, next_ids: torch.Tensor, hidden: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """The tokens that follow, and states of the target or of the head: → [num_tokens,
        hidden_size]"""
        x: torch.Tensor = self.fc(torch.cat((self.embed_tokens(next_ids), hidden), dim=-1))
        for layer in self.layers:
            x = layer(x, self.rotary, context)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] → [num_rows, vocab_size]"""
        logits: torch.Tensor = self.lm_head.logits(hidden, factor=self.logits_factor)
        return logits


class Eagle(Speculator):
    checkpoint: ClassVar[Literal["draft"]] = "draft"

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> int:
        names = config.get("architectures") or ()
        eagle = any("eagle" in str(name).lower() for name in names)
        return 2 * ((eagle or config.get("model_type") == "eagle") and not _is_third(config))

    @classmethod
    def overrides(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        inner = config.get("model")
        own = {"model_type": "llama", **inner} if isinstance(inner, dict) else {}
        return {**own, "architectures": ["EagleHead"]}

    @classmethod
    def needs(cls, site: DraftSite) -> SpeculatorNeeds:
        config = head_config(site)
        if config.hidden_size != site.target_config.hidden_size:
            raise ConfigError(
                f"{FIELD}: the head reads states of {config.hidden_size} numbers, and those of the "
                f"served model have {site.target_config.hidden_size}",
                param=FIELD,
            )
        head: Any = site.load(config, EagleHead)
        head.share(site.target)
        return SpeculatorNeeds(model=head, hidden=True, longest=longest(site, config))

    def __init__(self, setup: SpeculatorSetup) -> None:
        self._head: Any = setup.model
        self._num_drafts = setup.num_drafts
        self._vocab_size = setup.vocab_size

    def observe(self, step: ComputedTokens) -> torch.Tensor:
        states: torch.Tensor = self._head(step.next_ids, self.read(step), step.context)
        return states

    def read(self, step: ComputedTokens) -> torch.Tensor:
        """Return the states of the target that the head goes on from."""
        assert step.hidden is not None, "it is needed"
        return step.hidden

    def propose(self, tokens: KnownTokens) -> Drafts:
        rows, hidden = tokens.rows, tokens.states
        assert rows is not None and hidden is not None, "the engine runs its model"
        drafts: list[torch.Tensor] = []
        for number in range(self._num_drafts):
            if number:
                hidden = self._head(drafts[-1], self.recycled(hidden), rows.context(number - 1))
            logits = self._head.logits(hidden)[:, : self._vocab_size]
            drafts.append(rows.choose(logits, number))
        counts = torch.full_like(tokens.lengths, self._num_drafts)
        return Drafts(torch.stack(drafts, dim=1), counts)

    def recycled(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the head goes on from after a pass that gave `hidden`."""
        return hidden


def _is_third(config: Mapping[str, Any]) -> bool:
    """Whether a head's config.json is of EAGLE-3."""
    names = " ".join(str(name) for name in config.get("architectures") or ()).lower()
    return "eagle3" in names or "draft_vocab_size" in config


def head_config(site: DraftSite) -> ModelConfig:
    """Return the head's configuration, for texts as long as the target's where its rope reaches:
    files often state the length that a head was trained with. Raises ConfigError.
    """
    config, target = site.draft_config, site.target_config
    assert config is not None, "it has a checkpoint"
    if config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{FIELD}: the head was trained for a vocabulary of {config.vocab_size} tokens, and "
            f"the served model has {target.vocab_size}",
            param=FIELD,
        )
    if config.rope_parameters["rope_type"] in STRETCHED:
        return replace(config, max_model_len=target.max_model_len)
    return config


def longest(site: DraftSite, config: ModelConfig) -> int | None:
    """Return the longest text that a head reads; None: any that the target reads."""
    return (
        None if config.max_model_len >= site.target_config.max_model_len else config.max_model_len
    )
