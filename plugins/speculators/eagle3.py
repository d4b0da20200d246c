"""EAGLE-3: a head that reads the inputs of three layers of the target, and drafts from a smaller
vocabulary.

(Li, Wei, Zhang, Zhang 2025, arXiv 2503.01840.) Checkpoints as SpecForge, `speculators` and vLLM
write and read them. With t the states of the three layers, side by side:

    h = fc(t)                                        # once; later passes go on from their own x
    x = attention(input_layernorm(embed(next)) ‖ hidden_norm(h)) + h
    x = x + mlp(post_attention_layernorm(x))
    logits = lm_head(norm(x)) of the draft vocabulary; token i of it is i + d2t[i]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.config.speculative_config import FIELD
from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.linear import Linear
from ...core.nn.mlp import GatedMLP
from ...core.nn.norm import RMSNorm, norm_eps
from ...core.nn.rotary import Rotary
from ...core.protocols.speculators import ComputedTokens, DraftSite, SpeculatorNeeds
from .eagle import STACKED, Eagle, Head, HeadAttention, head_config, longest

NUM_TAPS = 3


class Eagle3Layer(nn.Module):
    """The first layer reads embeddings beside states; the others are a Llama's."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        size, eps = hf.hidden_size, norm_eps(hf, RMSNorm)
        self.first = layer == 0
        self.self_attn = HeadAttention(config, layer, build, size * (1 + self.first))
        self.input_layernorm = RMSNorm(size, eps, build)
        if self.first:
            self.hidden_norm = RMSNorm(size, eps, build)
        self.norms_residual = _flag(hf, "norm_before_residual")
        self.post_attention_layernorm = RMSNorm(size, eps, build)
        self.mlp = GatedMLP(size, hf.intermediate_size, hf.hidden_act, build)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        if self.first:
            normed = self.hidden_norm(hidden)
            both = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
            heads = self.self_attn.inner(both, None, rotary, context)
            residual = normed if self.norms_residual else hidden
            hidden = self.self_attn.project(heads, residual)
        else:
            hidden = self.self_attn(hidden, self.input_layernorm, rotary, context)
        out: torch.Tensor = self.mlp(hidden, self.post_attention_layernorm)
        return out


class Eagle3Head(Head):
    layer: ClassVar[type[nn.Module]] = Eagle3Layer
    weight_map = replace(
        Head.weight_map, stacked=STACKED, ignored=("t2d",),
        prefixes={"model.": "", "midlayer.": "layers.0."},
    )  # fmt: skip
    optional = ("embed_tokens.weight", "lm_head.weight", "d2t")

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        hf = config.hf_config
        size, eps = hf.hidden_size, norm_eps(hf, RMSNorm)
        self.num_taps = len(taps(hf, 0) or range(NUM_TAPS))
        read = int(getattr(hf, "target_hidden_size", None) or size)
        width = self.num_taps * read
        self.fc = Linear(width, size, build, bias=True)
        self.input_norm = RMSNorm(width, eps, build) if _flag(hf, "norm_before_fc") else None
        self.fc_norm = nn.ModuleList(
            RMSNorm(read, eps, build) for _ in range(self.num_taps if _flag(hf, "fc_norm") else 0)
        )
        self.norm = RMSNorm(size, eps, build)
        self.norms_output = _flag(hf, "norm_output")
        self.vocab_size = config.vocab_size
        drafted = torch.zeros(self.num_drafted(config), dtype=torch.int64, device=build.device)
        self.d2t = nn.Parameter(drafted, requires_grad=False)
        self.weight_map = replace(self.weight_map, optional=(*self.weight_map.optional, "fc.bias"))

    @staticmethod
    def num_drafted(config: ModelConfig) -> int:
        own = getattr(config.hf_config, "draft_vocab_size", None)
        return int(own or config.vocab_size)

    def after_loading(self) -> None:
        """Turn distances into token ids. Raises ConfigError for others than the vocabulary's."""
        super().after_loading()
        count = len(self.d2t)
        token_ids = self.d2t + torch.arange(count, device=self.d2t.device)
        if count < self.vocab_size and "d2t" in self.absent:
            raise ConfigError(f"{FIELD}: the checkpoint has no d2t, the tokens of its {count} rows",
                              param=FIELD)  # fmt: skip
        if not bool(((token_ids >= 0) & (token_ids < self.vocab_size)).all()):
            raise ConfigError(f"{FIELD}: d2t names tokens outside of the vocabulary of "
                              f"{self.vocab_size}", param=FIELD)  # fmt: skip
        self.register_buffer("token_ids", token_ids, persistent=False)

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """States of the target's layers → what the first pass goes on from."""
        if self.fc_norm:
            parts = states.chunk(self.num_taps, dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = torch.cat(normed, dim=-1)
        out: torch.Tensor = self.fc(states, norm=self.input_norm)
        return out

    def forward(
        self, next_ids: torch.Tensor, hidden: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """As `EagleHead`, not normed."""
        embedded = self.embed_tokens(next_ids)
        for layer in self.layers:
            hidden = layer(embedded, hidden, self.rotary, context)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] → [num_rows, vocab_size], -inf for what is not drafted"""
        logits: torch.Tensor = self.lm_head.logits(
            hidden, norm=self.norm, factor=self.logits_factor
        )
        if len(self.d2t) == self.vocab_size and "d2t" in self.absent:
            return logits
        whole = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        token_ids: Any = self.token_ids
        return whole.index_copy_(1, token_ids, logits)


class Eagle3(Eagle):
    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> int:
        if config.get("speculators_model_type") == "eagle3":
            return 2
        names = " ".join(str(name) for name in config.get("architectures") or ()).lower()
        return 2 * ("eagle3" in names or ("draft_vocab_size" in config and "eagle" in names))

    @classmethod
    def default_drafts(cls, config: Mapping[str, Any]) -> int | None:
        own = config.get("speculators_config") or {}
        methods = own.get("proposal_methods") or [{}] if isinstance(own, dict) else [{}]
        count = methods[0].get("speculative_tokens")
        return count if isinstance(count, int) else None

    @classmethod
    def overrides(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        inner = config.get("transformer_layer_config")
        if not isinstance(inner, dict):
            return {"architectures": ["Eagle3Head"]}
        own = {"norm_before_residual": config.get("norm_before_residual", True)}
        return {**inner, **own, "architectures": ["Eagle3Head"]}

    @classmethod
    def needs(cls, site: DraftSite) -> SpeculatorNeeds:
        config, target = head_config(site), site.target_config
        read = int(getattr(config.hf_config, "target_hidden_size", None) or config.hidden_size)
        if read != target.hidden_size:
            raise ConfigError(
                f"{FIELD}: the head reads states of {read} numbers, and those of the served model "
                f"have {target.hidden_size}",
                param=FIELD,
            )
        if (getattr(config.hf_config, "eagle_config", None) or {}).get(
            "use_aux_hidden_state"
        ) is False:
            raise ConfigError(
                f"{FIELD}: eagle_config.use_aux_hidden_state false is not supported: heads read "
                "the inputs of layers",
                param=FIELD,
            )
        head: Any = site.load(config, Eagle3Head)
        head.share(site.target)
        return SpeculatorNeeds(
            model=head, taps=cls.tapped_layers(site), longest=longest(site, config)
        )

    @classmethod
    def tapped_layers(cls, site: DraftSite) -> tuple[int, ...]:
        config, num_layers = site.draft_config, site.target_config.num_layers
        assert config is not None, "it has a checkpoint"
        return taps(config.hf_config, num_layers) or default_taps(num_layers)

    def read(self, step: ComputedTokens) -> torch.Tensor:
        assert step.taps is not None, "they are needed"
        out: torch.Tensor = self._head.combine(step.taps)
        return out

    def recycled(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._head.norm(hidden) if self._head.norms_output else hidden
        return out


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs heads read that do not say which: a low, a middle and a high
    one."""
    return 2, num_layers // 2, num_layers - 3


def taps(hf: Any, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs a head reads; (): it does not say.

    Names of vLLM count inputs of layers; those that SGLang and SpecForge write, outputs.
    """
    own = getattr(hf, "eagle_config", None) or {}
    inputs = getattr(hf, "eagle_aux_hidden_state_layer_ids", None) or own.get("layer_ids")
    outputs = own.get("eagle_aux_hidden_state_layer_ids")
    if inputs:
        return tuple(int(layer) for layer in inputs)
    return tuple(int(layer) + 1 for layer in outputs or ())


def _flag(hf: Any, name: str) -> bool:
    own = getattr(hf, "eagle_config", None) or {}
    return bool(getattr(hf, name, None) or own.get(name))
