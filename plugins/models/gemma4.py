"""Gemma 4 (text): values are normed; layers without a window have wider heads, and may use keys as
values. In small sizes each layer has its own input, and the last layers read earlier layers' keys
and values; others have a mixture of experts beside the MLP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import StackedExperts, WeightMap
from ...core.nn.attention import Attention
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.experts import SparseMLP
from ...core.nn.layer_operations.heads import rotate
from ...core.nn.linear import MergedLinear
from ...core.nn.mlp import GatedMLP
from ...core.nn.norm import RMSNorm, ScaledRMSNorm
from ...core.nn.rotary import Rotary
from ...core.nn.routing import Routing, RoutingRule
from ...core.parallel.missing_layer import MissingLayer
from ...core.parallel.ranks import Pipeline
from ...core.protocols.attention import AttentionSpec
from .blocks import BlockParts, NormedBlock
from .decoder import CausalLM, rope_of_type
from .expert_fields import EXPERTS
from .gemma import GemmaDecoder
from .gemma2 import Gemma2ForCausalLM
from .parts import WeightlessRMSNorm
from .per_layer_inputs import PER_LAYER_NAMES, PerLayerInput, PerLayerInputs, input_size
from .windows import WindowedAttention

NOT_READ = ("k_proj", "v_proj", "k_norm", "v_norm")
"""Unused parts of layers that read others' keys and values, which some checkpoints have."""


def first_reader(hf: Any) -> int:
    """Return the first of the layers that read earlier layers' keys and values; the number of
    layers if none does.
    """
    return max(0, int(hf.num_hidden_layers - hf.num_kv_shared_layers))


def check_stages(hf: Any, pipeline: Pipeline) -> None:
    """Raise ConfigError if a layer would read another stage's keys and values."""
    first = first_reader(hf)
    read = set(hf.layer_types[first:])
    last_of_kind = {kind: layer for layer, kind in enumerate(hf.layer_types[:first])}
    keepers = [layer for kind, layer in last_of_kind.items() if kind in read]
    own = dataclasses.replace(pipeline, stage=pipeline.size - 1).layers(hf.num_hidden_layers)
    if keepers and own.start > min(keepers):
        raise ConfigError(
            f"pipeline_parallel_size: the last stage would have layers {own.start} to {own[-1]}, "
            f"which read the keys and values of layers from {min(keepers)} on; give it these, too "
            "(pipeline_layer_partition), or have fewer stages",
            param="pipeline_parallel_size",
        )


INPUTS = "layer inputs"
"""In `ForwardContext.shared`: the layer's, [num_tokens, size], if layers have inputs."""


class SharedKV(NamedTuple):
    """A layer's keys and values of this step, for later layers of its type."""

    attention: Attention
    """Has the keys and values of earlier steps."""
    key: torch.Tensor
    """[num_tokens, num_kv_heads, head_dim], normed and rotated"""
    value: torch.Tensor


class Gemma4Attention(WindowedAttention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        hf = config.hf_config
        super().__init__(
            dataclasses.replace(config, hf_config=hf.per_layer_config[layer]), layer, build
        )
        self.kind, first = hf.layer_types[layer], first_reader(hf)
        self.reads, readers = layer >= first, hf.layer_types[first:]
        if self.reads and self.kind not in hf.layer_types[:first]:
            raise ConfigError(
                f"num_kv_shared_layers: layer {layer} would read the keys and values of an earlier "
                f"layer of type {self.kind!r}, but each of that type reads",
                param="num_kv_shared_layers",
            )
        last_of_kind = self.kind not in hf.layer_types[layer + 1 : first]
        self.keeps = not self.reads and last_of_kind and self.kind in readers
        same = getattr(hf, "attention_k_eq_v", False)
        self.keys_are_values = same and self.kind == "full_attention"
        if self.reads or self.keys_are_values:
            heads, rows = {"q": self.all_heads}, self.own.rows(self.head_dim)
            if not self.reads:
                heads["k"] = hf.per_layer_config[layer].num_key_value_heads
            self.qkv_proj = MergedLinear(
                hf.hidden_size, {name: n * self.head_dim for name, n in heads.items()}, build,
                bias=self.qkv_bias(hf), shard="out", shares={name: rows[name] for name in heads},
            )  # fmt: skip
        self.q_norm = RMSNorm(self.head_dim, hf.rms_norm_eps, build)
        if self.reads:
            del self.attention
            return
        self.k_norm = RMSNorm(self.head_dim, hf.rms_norm_eps, build)
        self.v_norm = WeightlessRMSNorm(self.head_dim, hf.rms_norm_eps, build)

    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        """Norms replace the scale. Raises ConfigError if text attends to later tokens."""
        if getattr(hf, "use_bidirectional_attention", None) == "all":
            raise ConfigError(
                "use_bidirectional_attention: 'all' is not supported, only attention to what came "
                "before",
                param="use_bidirectional_attention",
            )
        return msgspec.structs.replace(super().spec(hf, layer), scale=1.0)

    def inner(
        self,
        hidden: torch.Tensor,
        norm: nn.Module | None,
        rotary: Rotary | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Keys and values are in `context.shared`, by layer type, where later layers read them."""
        assert rotary is not None, "all layers rotate"
        qkv = self.qkv_proj(hidden, norm=norm)
        rows = qkv.view(len(qkv), -1, self.head_dim)
        cos_sin = rotary.cos_sin[context.positions][:, None].to(qkv.dtype)

        def rotated(heads: torch.Tensor, norm: Any) -> torch.Tensor:
            return rotate(norm(heads.contiguous()), cos_sin)

        if self.reads:
            shared: SharedKV = context.shared[self.kind]
            query = rotated(rows, self.q_norm)
            return shared.attention.attend(query, shared.key, shared.value, context, cached=True)
        query, key = rows[:, : self.num_heads], rows[:, self.num_heads :][:, : self.num_kv_heads]
        value = self.v_norm(rows[:, -self.num_kv_heads :].contiguous())
        if self.keeps:
            key = rotated(key, self.k_norm)
            context.shared[self.kind] = SharedKV(self.attention, key, value)
            return self.attention.attend(rotated(query, self.q_norm), key, value, context)
        if self.keys_are_values:
            qkv = torch.cat([qkv, value.flatten(1)], dim=-1)
        else:
            rows[:, -self.num_kv_heads :] = value
        return self.heads(qkv, rotary, context)


class Gemma4Mixture(SparseMLP):
    """Its router has its own norm, and a factor for each expert."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf = config.hf_config
        super().__init__(
            hf.num_experts, RoutingRule(hf.top_k_experts, renormalize=True), hf.hidden_size,
            hf.moe_intermediate_size, hf.hidden_activation, build,
        )  # fmt: skip
        size, eps = hf.hidden_size, hf.rms_norm_eps
        self.router_norm = ScaledRMSNorm(size, eps, build, factor=size**-0.5)
        self.per_expert_scale = nn.Parameter(build.empty(hf.num_experts))
        self.norm = RMSNorm(size, eps, build)

    def choose(self, hidden: torch.Tensor) -> Routing:
        routing = self.route(self.gate(self.router_norm(hidden)))
        factors = self.per_expert_scale.float()[routing.experts.long()]
        return routing._replace(weights=routing.weights * factors)

    def inputs(self, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(hidden)
        return normed


class Gemma4Block(NormedBlock):
    norms = (
        "input_layernorm", "post_attention_layernorm",
        "pre_feedforward_layernorm", "post_feedforward_layernorm",
    )  # fmt: skip
    self_attn: Gemma4Attention

    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__(parts, layer)
        config, build = parts.config, parts.build
        hf = config.hf_config
        self.layer_scalar = nn.Parameter(build.empty(1))
        self.mixture: Gemma4Mixture | None = None
        if getattr(hf, "enable_moe_block", False):
            self.mixture = Gemma4Mixture(config, build)
            self.post_feedforward_layernorm_1 = self.make_norm(hf, build)
            self.post_feedforward_layernorm_2 = self.make_norm(hf, build)
        self.per_layer_input = PerLayerInput(hf, build) if input_size(hf) else None

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        norms = [getattr(self, name) for name in self.norms]
        pre_attn_norm, post_attn_norm, pre_mlp_norm, post_mlp_norm = norms
        heads = self.self_attn.inner(hidden, pre_attn_norm, rotary, context)
        hidden = post_attn_norm.add(self.self_attn.project(heads), hidden)
        out = self.mlp(hidden, pre_mlp_norm, add=False)
        if self.mixture is not None:
            mixed = self.post_feedforward_layernorm_2(self.mixture(hidden, None, add=False))
            out = self.post_feedforward_layernorm_1(out) + mixed
        hidden = post_mlp_norm.add(out, hidden)
        if self.per_layer_input is not None:
            hidden = self.per_layer_input(hidden, context.shared[INPUTS], residual=hidden)
        return hidden * self.layer_scalar


class Gemma4Decoder(GemmaDecoder):
    block = Gemma4Block
    pipeline_parallel = True
    takes_media = True

    def __init__(self, parts: BlockParts) -> None:
        super().__init__(parts)
        config, build = parts.config, parts.build
        hf, pipeline = config.hf_config, build.ranks.pipeline
        check_stages(hf, pipeline)
        self.last, self.padding_id = pipeline.last, int(hf.pad_token_id or 0)
        self.num_streams, self.input_size = self.count_streams(hf), input_size(hf)
        self.states_size = self.num_streams * hf.hidden_size
        self.per_layer_inputs: Any = None
        if self.input_size:
            first = pipeline.first
            self.per_layer_inputs = PerLayerInputs(config, build) if first else MissingLayer()
        num_layers = config.num_layers - self.own_layers.start
        self.incoming_size = self.states_size + num_layers * self.input_size

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary]:
        hf = config.hf_config
        rotaries = {
            kind: Rotary(
                config, build, rope_of_type(hf, kind), head_dim=hf.per_layer_config[kind].head_dim
            )
            for kind in set(hf.layer_types)
        }
        return [rotaries[kind] for kind in hf.layer_types]

    @staticmethod
    def count_streams(hf: Any) -> int:
        """Return the number of hidden states per token between layers."""
        return 1

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """As `Decoder.forward`. Stages exchange [num_tokens, `incoming_size`]: the hidden states,
        then the remaining layers' inputs.
        """
        states, inputs = self.begin(input_ids, context)
        for number, (layer, rotary) in enumerate(self.stage_layers()):
            if inputs is not None:
                context.shared[INPUTS] = inputs[:, number]
            states = layer(states, rotary, context)
        if self.last:
            return self.leave(states)
        states = self.joined(states)
        if inputs is None:
            return states
        return torch.cat([states, inputs[:, len(self.own_layers) :].flatten(1)], dim=1)

    def begin(
        self, input_ids: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the first layer's input, and the inputs of all layers from there on, [num_tokens,
        num_layers, input_size]; None: layers have no inputs.
        """
        incoming, inputs = context.incoming, None
        if incoming is None:
            embeds = context.input_embeds
            if embeds is not None:
                # A layer's input for a token of an item is that of the padding token.
                input_ids = embeds.identified(input_ids, self.padding_id)
            hidden = self.embed(input_ids, context.positions)
            if embeds is not None:
                hidden = embeds.embedded(hidden)
            if self.input_size:
                inputs = self.per_layer_inputs(input_ids, hidden)
            return self.enter(hidden), inputs
        if self.input_size:
            inputs = incoming[:, self.states_size :].view(len(incoming), -1, self.input_size)
        return self.separated(incoming[:, : self.states_size]), inputs

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the first layer's input for embeddings, [num_tokens, hidden_size]."""
        return hidden

    def leave(self, states: torch.Tensor) -> torch.Tensor:
        """Return the hidden states from the last layer's output."""
        return states

    def joined(self, states: torch.Tensor) -> torch.Tensor:
        """Return the layers' states as [num_tokens, states_size]."""
        return states

    def separated(self, states: torch.Tensor) -> torch.Tensor:
        """Invert `joined`."""
        return states.contiguous()


@dataclasses.dataclass(frozen=True)
class Gemma4WeightMap(WeightMap):
    unread: tuple[str, ...] = ()
    """Name prefixes of unused tensors."""

    def pieces(
        self, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, str | None, torch.Tensor]]:
        if not name.startswith(self.unread):
            yield from super().pieces(name, tensor)


class Gemma4ForCausalLM(Gemma2ForCausalLM):
    config_fields = EXPERTS
    attention = Gemma4Attention  # type: ignore[assignment]
    decoder = Gemma4Decoder
    weight_map = Gemma4WeightMap(**vars(CausalLM.weight_map) | {
        "names": PER_LAYER_NAMES | {
            "mixture.gate": "router.proj", "router_norm.weight": "scale",
            "mixture.experts": "experts", "mixture.norm": "pre_feedforward_layernorm_2",
            "mixture": "router",
        },
        "together": {
            "gate_up_proj": StackedExperts("gate_up_proj.weight", ("gate", "up"), joined=True),
            "down_proj": StackedExperts("down_proj.weight"),
        },
    })  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        readers = range(first_reader(config.hf_config), config.num_layers)
        self.weight_map = dataclasses.replace(type(self).weight_map, unread=tuple(
            f"model.layers.{layer}.self_attn.{part}." for layer in readers for part in NOT_READ
        ))  # fmt: skip

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        wide = hf.use_double_wide_mlp and layer >= first_reader(hf)
        return GatedMLP(
            hf.hidden_size, hf.intermediate_size * (2 if wide else 1), hf.hidden_activation, build,
            field="hidden_activation",
        )  # fmt: skip
