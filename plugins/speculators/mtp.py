"""MTP: a layer in the served checkpoint that predicts one token further than the model.

(DeepSeek-V3, arXiv 2412.19437, section 2.2.) With h the last hidden state of a token:

    x = block(proj(enorm(embed(next token)) ‖ hnorm(h)))
    logits = head(norm(x))

The block is the family's own. Families differ in names, in the order of the two halves, in whether
the first token's embedding is zero, and in what further tokens go on from (`Layout`). Of several
such layers the first is used, once per draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from ...core.config.speculative_config import FIELD
from ...core.errors import ConfigError
from ...core.loading.json_file import with_texts
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.embedding import Embedding
from ...core.nn.linear import Linear
from ...core.nn.mlp import GatedMLP
from ...core.protocols.speculators import DraftSite, SpeculatorNeeds
from ..models.blocks import Block, BlockParts
from ..models.decoder import CausalLM
from ..models.indexed import has_indexer
from ..models.old_constructors import create
from ..models.windows import window_of_layer
from .eagle import Eagle

EMBEDDINGS = "model.embed_tokens."
BLOCK, UNUSED = "block.", "unused."


def last_layer(config: ModelConfig) -> int:
    return config.num_layers - 1


def indexed_layer(config: ModelConfig) -> int:
    """Return the last layer with an indexer of its own."""
    return max(n for n in range(config.num_layers) if has_indexer(config.hf_config, n))


def windowed_layer(config: ModelConfig) -> int:
    """Return the first layer with a window. Raises ConfigError."""
    for layer in range(config.num_layers):
        if window_of_layer(config.hf_config, layer) is not None:
            return layer
    raise ConfigError(
        f"{FIELD}: mtp needs a layer with a window, whose attention its own has, and layer_types "
        "has none",
        param=FIELD,
    )


def first_of_type(config: ModelConfig) -> int:
    """Return the first layer of the type that `mtp_layer_types` begins with, or the first one."""
    types: list[str] = config.hf_config.layer_types
    own = getattr(config.hf_config, "mtp_layer_types", None) or types
    return types.index(own[0]) if own[0] in types else 0


def wide_mlp(config: ModelConfig, layer: int, build: BuildContext) -> GatedMLP:
    hf = config.hf_config
    return GatedMLP(hf.hidden_size, hf.ffn_hidden_size, hf.hidden_act, build)


class Layout(NamedTuple):
    """How a family's checkpoints have the layer. {} is its number, N with N layers before it."""

    only: tuple[str, ...]
    """What its tensors' names begin with."""
    names: Mapping[str, str]
    """Start of a name → what the module calls it, the first that fits."""
    hidden_first: bool = False
    """Whether the product reads the state, then the embedding."""
    zero_first: bool = True
    """Whether the embedding at position 0 is zero."""
    normed: bool = True
    """Whether there is a norm before the head."""
    recycles: Literal["normed", "block", None] = "normed"
    """What a further token goes on from: the block's output, normed or not; None: it was trained
    for one token."""
    mlp: Callable[..., nn.Module] | None = None
    """What the block has in place of the model's mixture."""
    block: type[Block] | None = None
    """Its class, if it is not that of the model's layers."""
    like: Callable[[ModelConfig], int] = last_layer
    """Of which layer of the model its attention is; the rest is that of the last one."""
    turns: bool = False
    """Whether heads turn by position, though such layers of the model do not."""

    def at(self, layer: int) -> Layout:
        """Return the layout with the layer's number."""
        return self._replace(
            only=tuple(name.format(layer) for name in self.only),
            names={old.format(layer): new for old, new in self.names.items()},
        )


DEEPSEEK = Layout(
    only=("model.layers.{}.",),
    names={
        "model.layers.{}.enorm.": "enorm.",
        "model.layers.{}.hnorm.": "hnorm.",
        "model.layers.{}.eh_proj.": "eh_proj.",
        "model.layers.{}.shared_head.norm.": "norm.",
        # Copies of the model's.
        "model.layers.{}.shared_head.head.": UNUSED,
        "model.layers.{}.embed_tokens.": UNUSED,
        "model.layers.{}.": BLOCK,
    },
)
QWEN = Layout(
    only=("mtp.",),
    names={
        "mtp.pre_fc_norm_embedding.": "enorm.",
        "mtp.pre_fc_norm_hidden.": "hnorm.",
        "mtp.fc.": "eh_proj.",
        "mtp.norm.": "norm.",
        "mtp.layers.0.": BLOCK,
        "mtp.": UNUSED,
    },
    zero_first=False,
)
MIMO = Layout(
    only=("model.mtp_layers.0.",),
    names={
        "model.mtp_layers.0.token_layernorm.": "enorm.",
        "model.mtp_layers.0.hidden_layernorm.": "hnorm.",
        "model.mtp_layers.0.input_proj.": "eh_proj.",
        "model.mtp_layers.0.final_layernorm.": "norm.",
        "model.mtp_layers.0.": BLOCK,
    },
    hidden_first=True,
    recycles=None,
)
ERNIE = Layout(
    only=tuple(
        f"model.mtp_{part}.0." for part in ("emb_norm", "hidden_norm", "linear_proj", "block")
    ),
    names={
        "model.mtp_emb_norm.0.": "enorm.",
        "model.mtp_hidden_norm.0.": "hnorm.",
        "model.mtp_linear_proj.0.": "eh_proj.",
        "model.mtp_block.0.": BLOCK,
    },
    normed=False,
    recycles=None,
    mlp=CausalLM.mlp,
)
EXAONE = QWEN._replace(mlp=CausalLM.mlp, like=first_of_type, turns=True)
HUNYUAN = DEEPSEEK._replace(names={"model.layers.{}.final_layernorm.": "norm.", **DEEPSEEK.names})
MIMO_V2 = Layout(
    only=("model.mtp.",),
    names={
        **{f"model.mtp.layers.0.{name}.": f"{name}." for name in ("enorm", "hnorm", "eh_proj")},
        "model.mtp.layers.0.final_layernorm.": "norm.",
        "model.mtp.layers.0.pre_mlp_layernorm.": f"{BLOCK}post_attention_layernorm.",
        "model.mtp.layers.0.": BLOCK,
        "model.mtp.": UNUSED,
    },
    zero_first=False,
    mlp=CausalLM.mlp,
    like=windowed_layer,
)
LONGCAT = Layout(
    only=("model.mtp.",),
    names={
        "model.mtp.layers.0.enorm.m.": "enorm.",
        "model.mtp.layers.0.hnorm.m.": "hnorm.",
        "model.mtp.layers.0.eh_proj.": "eh_proj.",
        "model.mtp.norm.": "norm.",
        "model.mtp.layers.0.transformer_layer.": BLOCK,
        "model.mtp.layers.0.": BLOCK,
        "model.mtp.": UNUSED,
    },
    zero_first=False,
    mlp=wide_mlp,
    block=Block,
)
LAYOUTS: Mapping[str, Layout] = {
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "DeepseekV32ForCausalLM": DEEPSEEK._replace(like=indexed_layer),
    "Ernie4_5_MoeForCausalLM": ERNIE,
    "Glm4MoeForCausalLM": DEEPSEEK._replace(recycles="block"),
    "ExaoneMoeForCausalLM": EXAONE,
    "Glm4MoeLiteForCausalLM": DEEPSEEK._replace(recycles="block"),
    "GlmMoeDsaForCausalLM": DEEPSEEK._replace(like=indexed_layer),
    "HYV3ForCausalLM": HUNYUAN,
    "LongcatFlashForCausalLM": LONGCAT,
    "MiMoForCausalLM": MIMO,
    "MiMoV2FlashForCausalLM": MIMO_V2,
    "Qwen3NextForCausalLM": QWEN,
    "Qwen3_5ForCausalLM": QWEN,
    "Qwen3_5MoeForCausalLM": QWEN,
}
"""Architecture → how its checkpoints have the layer."""


class MtpHead(nn.Module):
    """The layer, with the model's embeddings and head. Subclassed for each model."""

    target: ClassVar[Any]
    layout: ClassVar[Layout]

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf, family = config.hf_config, type(self.target)
        decoder = family.decoder
        block, layer = self.layout.block or decoder.block_of(config), self.layout.like(config)
        last = last_layer(config)

        def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
            made: nn.Module = (self.layout.mlp or family.mlp)(config, last, build)
            return made

        self.embed_tokens: Any = None
        """Where the model has none: in the last of several stages."""
        if not isinstance(self.target.model.embed_tokens, Embedding):
            self.embed_tokens = Embedding(
                config.vocab_size, hf.hidden_size, build, shard="vocabulary"
            )
        self.enorm, self.hnorm = block.make_norm(hf, build), block.make_norm(hf, build)
        self.eh_proj = Linear(2 * hf.hidden_size, hf.hidden_size, build)
        self.block = create(block, BlockParts(config, build, family.attention, mlp), layer)
        self.norm = block.make_norm(hf, build) if self.layout.normed else None
        rotaries = decoder.rotaries_of(config, build)
        self.rotary = rotaries[layer]
        if self.rotary is None and self.layout.turns:
            self.rotary = next((rotary for rotary in rotaries if rotary is not None), None)
        self.weight_map = replace(
            self.target.weight_map, prefixes=self.layout.names, only=self.layout.only, tied={},
            ignored=(UNUSED,), media=None,
        )  # fmt: skip

    def forward(
        self, next_ids: torch.Tensor, hidden: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """The tokens that follow, and states: → the block's output, [num_tokens, hidden_size]"""
        model = self.target.model
        embed = model.embed_tokens if self.embed_tokens is None else self.embed_tokens
        embedded = embed(next_ids, factor=1.0 if model.scale is None else model.scale)
        if self.layout.zero_first:
            embedded = embedded.masked_fill(context.positions[:, None] == 0, 0.0)
        halves = [self.enorm(embedded), self.hnorm(hidden)]
        if self.layout.hidden_first:
            halves.reverse()
        out: torch.Tensor = self.block(
            self.eh_proj(torch.cat(halves, dim=-1)), self.rotary, context
        )
        context.shared.clear()
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] → [num_rows, vocab_size]"""
        head, factor = self.target.output_embeddings, self.target.logits_factor
        logits: torch.Tensor = head.logits(hidden, norm=self.norm, factor=factor)
        return logits

    def recycled(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm is not None and self.layout.recycles == "normed"
        out: torch.Tensor = self.norm(hidden) if normed else hidden  # type: ignore[misc]
        return out


class Mtp(Eagle):
    checkpoint: ClassVar[Literal["draft", "target"]] = "target"  # type: ignore[assignment]

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> int:
        return 0

    @classmethod
    def carried_by(cls, config: Mapping[str, Any]) -> bool:
        names = config.get("architectures") or ()
        return num_layers(config) > 0 and any(name in LAYOUTS for name in names)

    @classmethod
    def default_drafts(cls, config: Mapping[str, Any]) -> int | None:
        return num_layers(config) or None

    @classmethod
    def overrides(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}

    @classmethod
    def needs(cls, site: DraftSite) -> SpeculatorNeeds:
        name = site.target_config.architecture
        if name not in LAYOUTS or not isinstance(site.target, CausalLM):
            raise ConfigError(
                f"{FIELD}: mtp serves no {name}; it serves {', '.join(sorted(LAYOUTS))}",
                param=FIELD,
            )
        layout = LAYOUTS[name].at(site.target_config.num_layers)
        if not isinstance(site.target.model.embed_tokens, Embedding):
            layout = layout._replace(
                only=(*layout.only, EMBEDDINGS), names={EMBEDDINGS: "embed_tokens.", **layout.names}
            )
        if layout.recycles is None and site.num_drafts > 1:
            raise ConfigError(
                f"{FIELD}: {name} was trained to predict one token further; set "
                f"num_speculative_tokens to 1, not {site.num_drafts}",
                param=FIELD,
            )
        config = site.draft_config
        assert config is not None, "the target has one"
        settings = config.quantization_config
        if settings is not None:
            settings = with_texts(settings, lambda text: _own_name(text, layout))
        head = site.load(
            replace(config, quantization_config=settings),
            type("Head", (MtpHead,), {
                "target": site.target, "layout": layout,
                "tensor_parallel": bool(getattr(site.target, "tensor_parallel", False)),
            }),
        )  # fmt: skip
        return SpeculatorNeeds(model=head, hidden=True)

    def recycled(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._head.recycled(hidden)
        return out


def num_layers(config: Mapping[str, Any]) -> int:
    """Return how many such layers a config.json says that its checkpoint has."""
    inner = config.get("text_config")
    for fields in (config, inner if isinstance(inner, dict) else {}):
        for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
            if isinstance(count := fields.get(name), int):
                return count
    return 0


def _own_name(text: str, layout: Layout) -> str:
    old = next((old for old in layout.names if text.startswith(old)), None)
    return text if old is None else layout.names[old] + text[len(old) :]
