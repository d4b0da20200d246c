"""Common parts of Llama-like decoders: embedding, blocks of attention and MLP, final norm, head.

A family defines an attention class (the computation of queries, keys and values), a module in the
MLP's place, and some configuration; this file is independent of families.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder, Shard, WeightMap
from ...core.nn.attention import Attention
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.embedding import Embedding
from ...core.nn.latent.layer import LatentAttention
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.mlp import GatedMLP, PlainMLP
from ...core.nn.norm import LayerNorm, RMSNorm, norm_eps
from ...core.nn.rotary import Rotary
from ...core.parallel.elsewhere import Elsewhere
from ...core.parallel.sharding import HeadShare, Sharding
from ...core.protocols.attention import AttentionSpec
from ...core.protocols.field_kinds import FieldKind
from ...core.protocols.models import HiddenStates
from ...core.text.tokenizer import Tokenizer


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions. Families override the small methods."""

    fused: ClassVar[bool] = False
    """Queries, keys and values are one tensor of the checkpoint."""
    norm_last: ClassVar[bool] = False
    """`q_norm` and `k_norm` come after the rotation."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        num_heads, num_kv_heads = config.num_heads, self.kv_heads(config)
        self.ranks, self.head_dim = build.ranks, config.head_dim
        self.max_model_len = config.max_model_len
        self.all_heads = num_heads
        self.own = HeadShare.of(num_heads, num_kv_heads, build.ranks.tensor)
        """This rank's heads, of all."""
        self.num_heads, self.num_kv_heads = self.own.num_heads, self.own.num_kv_heads
        sizes = {
            "q": num_heads * self.head_dim,
            "k": num_kv_heads * self.head_dim,
            "v": num_kv_heads * self.head_dim,
        }
        self.qkv_proj = MergedLinear(
            hf.hidden_size, sizes, build, bias=self.qkv_bias(hf), shard="out",
            shares=self.own.rows(self.head_dim), whole=self.fused,
        )  # fmt: skip
        bias = self.output_bias(hf)
        self.o_proj = Linear(sizes["q"], hf.hidden_size, build, bias=bias, shard="in")
        self.attention = Attention(self.spec(hf, layer), build)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.sinks: nn.Parameter | None = None
        self.shardings: dict[str, Sharding] = {}

    @staticmethod
    def kv_heads(config: ModelConfig) -> int:
        """Return the number of key heads, where the configuration calls it otherwise."""
        return config.num_kv_heads

    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        """Return what this layer requires of the backend."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            sliding_window=self.sliding_window(hf, layer),
        )

    def add_sinks(self, build: BuildContext) -> None:
        """Create a sink for each head."""
        self.sinks = nn.Parameter(build.empty(self.num_heads))
        if build.ranks.tensor.size > 1:
            sharding = Sharding(0, {"": self.all_heads}, {"": (self.own.queries,)})
            self.shardings["sinks"] = sharding

    @staticmethod
    def qkv_bias(hf: object) -> bool:
        return bool(getattr(hf, "attention_bias", False))

    @staticmethod
    def output_bias(hf: object) -> bool:
        return bool(getattr(hf, "attention_bias", False))

    @staticmethod
    def sliding_window(hf: object, layer: int) -> int | None:
        return None

    def forward(
        self,
        hidden: torch.Tensor,
        norm: nn.Module | None,
        rotary: Rotary | None,
        context: ForwardContext,
        *,
        add: bool = True,
    ) -> torch.Tensor:
        """hidden + attention(norm(hidden)), or with `add` False the second term alone:
        [num_tokens, hidden_size] → the same shape."""
        heads = self.inner(hidden, norm, rotary, context)
        return self.project(heads, hidden if add else None)

    def project(self, heads: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """residual + output of `heads`, [num_tokens, num_heads * head_dim]: → [num_tokens,
        hidden_size]"""
        return self.ranks.add(residual, (self.o_proj, heads))

    def inner(
        self,
        hidden: torch.Tensor,
        norm: nn.Module | None,
        rotary: Rotary | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Attention output of all heads for norm(hidden): [num_tokens, hidden_size] → [num_tokens,
        num_heads * head_dim]"""
        return self.heads(self.qkv_proj(hidden, norm=norm), rotary, context)

    def heads(
        self, qkv: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        """Attention output of all heads: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim],
        may be overwritten → [num_tokens, num_heads * head_dim]"""
        out: torch.Tensor = self.attention(
            qkv, context, rotary=rotary, query_norm=self.q_norm, key_norm=self.k_norm,
            sinks=self.sinks, norm_last=self.norm_last,
        )  # fmt: skip
        return out


MakeMLP: TypeAlias = Callable[[ModelConfig, int, BuildContext], nn.Module]
"""(configuration, layer, build) → a module whose forward(hidden, norm) adds to the residual
stream."""


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    norm: ClassVar[type[RMSNorm | LayerNorm]] = RMSNorm
    """Type of the block's norms and the decoder's last one. Created with the configuration's
    eps."""
    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    """Names of the block's norms in checkpoints."""
    divides: ClassVar[bool] = True
    """Whether `forward` does what `attend` and then `after_attention` do. Of a class with a
    `forward` of its own it is False unless the class says otherwise."""
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def __init_subclass__(cls) -> None:
        if "forward" in vars(cls) and "divides" not in vars(cls):
            cls.divides = False

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        build: BuildContext,
        attention: type[SelfAttention],
        mlp: MakeMLP,
    ) -> None:
        super().__init__()
        for name in filter(None, self.norms):
            setattr(self, name, self.make_norm(config.hf_config, build))
        self.self_attn = attention(config, layer, build)
        self.mlp = mlp(config, layer, build)

    def after_loading(self) -> None:
        """Tell attention which weights are read after it."""
        attention = getattr(getattr(self, "self_attn", None), "attention", None)
        if isinstance(attention, Attention):
            weights = [getattr(product, "weight", None) for product in self.products_after()]
            attention.next_weights = tuple(
                weight for weight in weights
                if isinstance(weight, torch.Tensor) and weight.is_contiguous()
            )  # fmt: skip

    def products_after(self) -> list[nn.Module | None]:
        """Return the first products after attention, in order."""
        return [getattr(self.self_attn, "o_proj", None), self._first_of_mlp()]

    def _first_of_mlp(self) -> nn.Module | None:
        mlp = getattr(self, "mlp", None)
        layers = (getattr(mlp, name, None) for name in ("gate_up_proj", "up_proj"))
        return next((layer for layer in layers if isinstance(layer, nn.Module)), None)

    @classmethod
    def make_norm(cls, hf: Any, build: BuildContext) -> nn.Module:
        """Create one of the block's norms, or the decoder's last one."""
        return cls.norm(hf.hidden_size, norm_eps(hf, cls.norm), build)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] → the same shape; `hidden` may be overwritten."""
        return self._add_mlp(self.self_attn(hidden, self.input_layernorm, rotary, context))

    def attend(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        """Attention output of all heads: [num_tokens, hidden_size] → [num_tokens, num_heads *
        head_dim]"""
        norm = getattr(self, self.norms[0], None)
        return self.self_attn.inner(hidden, norm, rotary, context)

    def after_attention(self, hidden: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """Do what the block does with each token alone. hidden: the block's input, [num_rows,
        hidden_size], may be overwritten; heads: what `attend` returned → as hidden"""
        return self._add_mlp(self.self_attn.project(heads, hidden))

    def _add_mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(hidden, self.post_attention_layernorm)
        return out


class NormedBlock(Block):
    """hidden + norm(f(norm(hidden))), for attention and then for the MLP.

    `norms`: before and after attention, before and after the MLP; "" for none.
    """

    divides: ClassVar[bool] = True
    mlp: nn.Module

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] → the same shape; `hidden` may be overwritten."""
        norm = getattr(self, self.norms[0], None)
        return self._add_both(hidden, self.self_attn(hidden, norm, rotary, context, add=False))

    def after_attention(self, hidden: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """As `Block`."""
        return self._add_both(hidden, self.self_attn.project(heads))

    def _add_both(self, hidden: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        """answer: attention's, not normed."""
        norms: list[Any] = [getattr(self, name, None) for name in self.norms]
        _, behind, before_mlp, behind_mlp = norms
        hidden = behind.add(answer, hidden)
        answer = self.mlp(hidden, before_mlp, add=False)
        out: torch.Tensor = behind_mlp.add(answer, hidden)
        return out


class ParallelBlock(Block):
    """hidden + attention(norm(hidden)) + mlp(norm(hidden)), of the same stream.

    `norms`: one for both, or one for attention and one for the MLP.
    """

    norms: ClassVar[tuple[str, ...]] = ("input_layernorm",)
    divides: ClassVar[bool] = True
    mlp: GatedMLP | PlainMLP

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] → the same shape; `hidden` may be overwritten."""
        norms = [getattr(self, name) for name in self.norms]
        # Products of one token apply norms themselves, but for quantized weights.
        if hidden.shape[0] == 1 and isinstance(self.self_attn.qkv_proj, Linear):
            heads = self.self_attn.inner(hidden, norms[0], rotary, context)
            inner = self.mlp.inner(hidden, norms[-1])
        else:
            normed = [norm(hidden) for norm in norms]
            heads = self.self_attn.inner(normed[0], None, rotary, context)
            inner = self.mlp.inner(normed[-1])
        return self._add(hidden, heads, inner)

    def after_attention(self, hidden: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """As `Block`."""
        inner = self.mlp.inner(hidden, getattr(self, self.norms[-1]))
        return self._add(hidden, heads, inner)

    def products_after(self) -> list[nn.Module | None]:
        """As `Block`."""
        return [self._first_of_mlp(), self.self_attn.o_proj]

    def _add(self, hidden: torch.Tensor, heads: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        products = (self.self_attn.o_proj, heads), (self.mlp.down_proj, inner)
        return self.self_attn.ranks.add(hidden, *products)


def _shapes(module: nn.Module) -> Iterator[Any]:
    """Yield the properties that decide which kernels a module launches."""
    for name, part in module.named_modules():
        attends = isinstance(part, Attention | LatentAttention)
        yield name, type(part), part.spec if attends else None
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        yield name, tensor.shape, tensor.dtype


def _divides(block: nn.Module) -> bool:
    """Whether a block's attention can be computed without what follows."""
    if not isinstance(block, Block) or not block.divides:
        return False
    return type(block.self_attn).forward is SelfAttention.forward


class Decoder(nn.Module):
    """Everything between token ids and the last norm. A family may define its own blocks."""

    block: ClassVar[type[Block]] = Block
    pipeline_parallel: ClassVar[bool] = True
    """Whether `forward` does its part on each stage. Of a class with a `forward` of its own it is
    False unless the class says otherwise."""

    def __init_subclass__(cls) -> None:
        if "forward" in vars(cls) and "pipeline_parallel" not in vars(cls):
            cls.pipeline_parallel = False

    def __init__(
        self,
        config: ModelConfig,
        build: BuildContext,
        attention: type[SelfAttention],
        mlp: MakeMLP,
    ) -> None:
        super().__init__()
        hf, pipeline = config.hf_config, build.ranks.pipeline
        ties = config.pooling is None and bool(getattr(hf, "tie_word_embeddings", False))
        self.embed_tokens: Any = Elsewhere()
        if pipeline.first or (pipeline.last and ties):
            self.embed_tokens = Embedding(
                config.vocab_size, hf.hidden_size, build, shard="vocabulary"
            )
        self.scale = self.embedding_scale(config, build)
        self.rotaries = nn.ModuleList(self.rotaries_of(config, build))  # type: ignore[arg-type]
        block = self.block_of(config)
        count = self.num_blocks(hf)
        own = self.own_layers = pipeline.layers(count)
        """Numbers of the layers that this stage has."""
        self.layers = nn.ModuleList(
            block(config, layer, build, attention, mlp) if layer in own else Elsewhere()
            for layer in range(count)
        )
        self.norm: Any = block.make_norm(hf, build) if pipeline.last else Elsewhere()
        self.incoming_size = config.hidden_size
        """Width of what the stage before sends, `ForwardContext.incoming`."""
        self.unfinished = False
        """Whether `forward` leaves what follows the last layer's attention to `finish`."""
        if pipeline.last and config.pooling is None and type(self).forward is Decoder.forward:
            self.unfinished = _divides(self.layers[-1])

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> HiddenStates:
        """[num_tokens] → [num_tokens, hidden_size], not normed; of this stage's layers. Where it is
        `unfinished`, the last layer's input and the output of its heads."""
        hidden = context.incoming
        if hidden is None:
            hidden = self.embed(input_ids, context.positions)
        layers = self.stage_layers()
        last = layers.pop() if self.unfinished else None
        for layer, rotary in self.unlike_layers() if context.precompiling else layers:
            hidden = layer(hidden, rotary, context)
        if last is None:
            return hidden
        layer, rotary = last
        return hidden, layer.attend(hidden, rotary, context)  # type: ignore[operator]

    def finish(self, states: HiddenStates) -> torch.Tensor:
        """Go on where `forward` ended, for some of its tokens: → [num_rows, hidden_size], not
        normed."""
        if isinstance(states, torch.Tensor):
            return states
        hidden: torch.Tensor = self.layers[-1].after_attention(*states)  # type: ignore[operator]
        return hidden

    def stage_layers(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return the layers of this stage, each with its rotary embedding."""
        return [(self.layers[number], self.rotaries[number]) for number in self.own_layers]

    def unlike_layers(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return one layer of each kind, with its rotary embedding: together they launch all
        kernels."""
        kinds: dict[tuple[Any, ...], tuple[nn.Module, nn.Module]] = {}
        for layer, rotary in self.stage_layers():
            shapes = () if rotary is None else _shapes(rotary)
            kinds.setdefault((*_shapes(layer), *shapes), (layer, rotary))
        return list(kinds.values())

    @classmethod
    def block_of(cls, config: ModelConfig) -> type[Block]:
        """Return the block class; for families whose configuration decides it."""
        return cls.block

    @staticmethod
    def num_blocks(hf: Any) -> int:
        """Return the number of blocks, where a block is several of the configuration's layers."""
        return int(hf.num_hidden_layers)

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        """Return one rotary embedding per layer, None for a layer that does not rotate; by default
        all layers share one."""
        return [Rotary(config, build)] * config.num_layers

    def embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed token ids: both [num_tokens] → input of the first layer, [num_tokens,
        hidden_size]."""
        hidden: torch.Tensor = self.embed_tokens(input_ids)
        return hidden if self.scale is None else hidden * self.scale

    @staticmethod
    def embedding_scale(config: ModelConfig, build: BuildContext) -> float | None:
        """Return the factor of the embeddings; None: no scaling."""
        return None


def rotaries_by_type(config: ModelConfig, build: BuildContext) -> list[Rotary]:
    """`Decoder.rotaries_of` where the configuration has rope parameters for each layer type."""
    hf = config.hf_config
    kinds = sorted(set(hf.layer_types))
    rotaries = {kind: Rotary(config, build, rope_of_type(hf, kind)) for kind in kinds}
    return [rotaries[kind] for kind in hf.layer_types]


def rope_of_type(hf: Any, kind: str) -> dict[str, Any]:
    """Return the rope parameters of a layer type. Raises ConfigError if there are none."""
    rope = (hf.rope_parameters or {}).get(kind)
    if not isinstance(rope, dict):
        raise ConfigError(
            f"rope_parameters.{kind}: must be an object, since layer_types has layers of this type",
            param=f"rope_parameters.{kind}",
        )
    return rope


QKV_SHARDS = {
    "q_proj": Shard("qkv_proj", "q"),
    "k_proj": Shard("qkv_proj", "k"),
    "v_proj": Shard("qkv_proj", "v"),
}
"""Names of queries, keys and values in checkpoints with three tensors."""


class HeadlessLM(nn.Module):
    """A decoder whose states are pooled. A family sets `attention`, and may set `decoder` and
    override `mlp`.

    Checkpoints of embedding models often omit the prefix `model.` of other checkpoints' names.
    """

    attention: ClassVar[type[SelfAttention]] = SelfAttention
    decoder: ClassVar[type[Decoder]] = Decoder
    pipeline_parallel: ClassVar[bool] = True
    """Whether stages can have its layers: all work is that of a decoder's that can."""
    weight_map: WeightMap = WeightMap(
        stacked={
            **QKV_SHARDS,
            "gate_proj": Shard("gate_up_proj", "gate"),
            "up_proj": Shard("gate_up_proj", "up"),
        },
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        prefixes={f"{part}.": f"model.{part}." for part in ("embed_tokens", "layers", "norm")},
    )

    config_fields: ClassVar[Mapping[str, FieldKind]] = {}
    """Kinds of a family's own fields of config.json; its bases' count, too."""

    def __init_subclass__(cls) -> None:
        cls.pipeline_parallel = cls.forward is HeadlessLM.forward and cls.decoder.pipeline_parallel

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        self.model = self.decoder(config, build, self.attention, self.mlp)
        if rows := self.row_orders(config):
            self.weight_map = replace(self.weight_map, rows=rows)

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        """Return the `rows` of the weight map, for families whose sizes decide them."""
        return {}

    @property
    def incoming_size(self) -> int:
        """Width of what the stage before sends."""
        return self.model.incoming_size

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> HiddenStates:
        """[num_tokens] → hidden states of the decoder"""
        hidden: HiddenStates = self.model(input_ids, context)
        return hidden

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        """Create the module that follows a layer's attention: a `MakeMLP`."""
        hf = config.hf_config
        return GatedMLP(
            hf.hidden_size,
            hf.intermediate_size,
            hf.hidden_act,
            build,
            bias=bool(getattr(hf, "mlp_bias", False)),
        )

    def pooling_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the last norm: [any, hidden_size] → the same shape."""
        out: torch.Tensor = self.model.norm(hidden)
        return out


class CausalLM(HeadlessLM):
    """A decoder and its head; the head is not used for pooling."""

    head_bias: ClassVar[bool] = False
    """Whether the head, which is then not tied, has a bias."""
    finishes: ClassVar[bool] = True
    """Whether `compute_logits` takes what the decoder has left unfinished. Of a class with a
    `compute_logits` or a `forward` of its own it is False unless the class says otherwise."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if {"compute_logits", "forward"} & vars(cls).keys() and "finishes" not in vars(cls):
            cls.finishes = False

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.model.unfinished = self.model.unfinished and self.finishes
        if config.pooling is None and not config.hf_config.tie_word_embeddings:
            self.lm_head: Any = Elsewhere()
            if build.ranks.pipeline.last:
                self.lm_head = Embedding(
                    config.vocab_size, config.hidden_size, build, bias=self.head_bias,
                    shard="vocabulary",
                )  # fmt: skip

    def compute_logits(self, hidden: HiddenStates) -> torch.Tensor:
        """Rows of `forward`'s result → [num_rows, vocab_size]"""
        head: Embedding = getattr(self, "lm_head", self.model.embed_tokens)
        return head.logits(self.model.finish(hidden), norm=self.model.norm)


class DecoderClassifier(HeadlessLM):
    """A decoder and a linear classifier of its last state; the classifier may consist of rows of a
    head."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        assert config.pooling is not None, "a classifier is pooled"
        self.operations, self.folder = build.operations, config.path
        self.tokens = config.pooling.tokens
        self.rows: torch.Tensor | None = None
        """[num_labels, hidden_size], if the classifier is made from a head."""
        if self.tokens is None:
            self.score = Linear(config.hidden_size, len(config.pooling.labels), build)
        elif not config.hf_config.tie_word_embeddings:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size, build)

    def after_loading(self) -> None:
        """Copy the head's rows of a few tokens to the classifier, and release the rest of the
        head."""
        if self.tokens is None:
            return
        head: Embedding = getattr(self, "lm_head", self.model.embed_tokens)
        token_ids = torch.tensor(self._token_ids(self.tokens.tokens), device=head.weight.device)
        rows = head(token_ids).float()
        rows = rows[1:] - rows[:1] if self.tokens.difference else rows
        self.rows = rows.to(head.weight.dtype)
        if hasattr(self, "lm_head"):
            del self.lm_head

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] → logits [num_rows, num_labels]"""
        if self.rows is not None:
            return self.operations.linear(pooled, self.rows)
        logits: torch.Tensor = self.score(pooled)
        return logits

    def _token_ids(self, tokens: Sequence[str]) -> list[int]:
        """Return the token ids. Raises ConfigError if a text is not one token: a wrong id would
        give wrong scores silently."""
        tokenizer = Tokenizer.load(str(self.folder))
        token_ids = []
        for token in tokens:
            ids = tokenizer.encode(token, add_special_tokens=False)
            if len(ids) != 1 or ids[0] == tokenizer.unknown_id:
                raise ConfigError(
                    f"hf_overrides: {token!r} of classifier_from_token is not one token of this "
                    f"model (ids {ids})",
                    param="hf_overrides",
                )
            token_ids += ids
        return token_ids
