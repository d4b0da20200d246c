"""Common parts of Llama-like decoders: embedding, blocks (`blocks.py`), final norm, head.

A family defines an attention class (the computation of queries, keys and values), a module in the
MLP's place, and some configuration; this file is independent of families.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder, Shard, WeightMap
from ...core.nn.attention import Attention
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.embedding import Embedding
from ...core.nn.latent.layer import LatentAttention
from ...core.nn.linear import Linear
from ...core.nn.mlp import GatedMLP
from ...core.nn.operations import PositionRows
from ...core.nn.rotary import Rotary
from ...core.parallel.missing_layer import MissingLayer
from ...core.protocols.field_kinds import FieldKind
from ...core.protocols.models import HiddenStates
from ...core.text.tokenizer import Tokenizer
from .blocks import Block, BlockParts, MakeMLP, NormedBlock, ParallelBlock, SelfAttention
from .old_constructors import create, of_fields

__all__ = [
    "QKV_SHARDS", "Block", "BlockParts", "CausalLM", "Decoder", "DecoderClassifier", "HeadlessLM",
    "MakeMLP", "NormedBlock", "ParallelBlock", "SelfAttention", "rope_of_type", "rotaries_by_type",
]  # fmt: skip


def _shapes(module: nn.Module) -> Iterator[Any]:
    for name, part in module.named_modules():
        attends = isinstance(part, Attention | LatentAttention)
        yield name, type(part), part.spec if attends else None
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        yield name, tensor.shape, tensor.dtype


def _copies(hidden: HiddenStates) -> HiddenStates:
    """Return states that may be overwritten."""
    if isinstance(hidden, torch.Tensor):
        return hidden.clone()
    return tuple(part.clone() for part in hidden)


def _divides(block: nn.Module) -> bool:
    """Whether a block's attention can be computed without the rest."""
    if not isinstance(block, Block) or not block.divides:
        return False
    return type(block.self_attn).forward is SelfAttention.forward


FORWARD_FACTS = ("pipeline_parallel", "taps", "takes_media", "takes_embeddings")
"""What a decoder's own `forward` may leave undone."""


class Decoder(nn.Module):
    """Everything between token ids and the last norm. A family may define its own blocks."""

    block: ClassVar[type[Block]] = Block
    pipeline_parallel: ClassVar[bool] = True
    """Whether `forward` does its part on each stage. Of a class with a `forward` of its own it is
    False unless the class says otherwise."""
    taps: ClassVar[bool] = True
    """Whether `forward` keeps the layers' inputs that are asked for (`ForwardContext.taps`); as
    `pipeline_parallel`."""
    takes_media: ClassVar[bool] = True
    """Whether `forward` puts rows of an encoder in the place of embeddings; as
    `pipeline_parallel`."""
    takes_embeddings: ClassVar[bool] = True
    """Whether it puts a request's embeddings there; as `pipeline_parallel`."""
    unfinished: bool = False
    """Whether `forward` leaves what follows the last layer's attention to `finish`."""

    def __init_subclass__(cls) -> None:
        for fact in FORWARD_FACTS if "forward" in vars(cls) else ():
            if fact not in vars(cls):
                setattr(cls, fact, False)

    @of_fields(BlockParts, with_layer=False)
    def __init__(self, parts: BlockParts) -> None:
        super().__init__()
        config, build = parts.config, parts.build
        hf, pipeline = config.hf_config, build.ranks.pipeline
        ties = config.pooling is None and bool(getattr(hf, "tie_word_embeddings", False))
        self.embed_tokens: Any = MissingLayer()
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
            create(block, parts, layer) if layer in own else MissingLayer()
            for layer in range(count)
        )
        self.norm: Any = block.make_norm(hf, build) if pipeline.last else MissingLayer()
        self.incoming_size = config.hidden_size
        """Width of what the stage before sends, `ForwardContext.incoming`."""
        if pipeline.last and config.pooling is None and type(self).forward is Decoder.forward:
            self.unfinished = _divides(self.layers[-1]) and not build.every_token

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> HiddenStates:
        """[num_tokens] → [num_tokens, hidden_size], not normed; of this stage's layers. Where it is
        `unfinished`, the last layer's input and the output of its heads."""
        hidden = context.incoming
        if hidden is None:
            hidden = self.embed(input_ids, context.positions)
            if context.input_embeds is not None:
                hidden = context.input_embeds.embedded(hidden)
        embeds = context.input_embeds
        layers = self.stage_layers()
        last = layers.pop() if self.unfinished else None
        taps = None if context.precompiling else context.taps
        first = self.own_layers.start
        for number, (layer, rotary) in enumerate(
            self.unlike_layers() if context.precompiling else layers, first
        ):
            if taps is not None:
                taps.keep(number, hidden)
            hidden = layer(hidden, rotary, context)
            if embeds is not None:
                hidden = embeds.after_layer(number, hidden)
        if taps is not None:
            taps.keep(first + len(layers), hidden)
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
        factor = 1.0 if self.scale is None else self.scale
        rows = self.position_rows(positions)
        hidden: torch.Tensor = self.embed_tokens(input_ids, factor=factor, positions=rows)
        return hidden

    def position_rows(self, positions: torch.Tensor) -> PositionRows | None:
        """Return what `embed` adds for positions, [num_tokens]; None: nothing."""
        return None

    @staticmethod
    def embedding_scale(config: ModelConfig, build: BuildContext) -> float | None:
        """Return the factor of the embeddings; None: no scaling."""
        return None


def rotaries_by_type(config: ModelConfig, build: BuildContext) -> list[Rotary]:
    """As `Decoder.rotaries_of`, with rope parameters per layer type."""
    hf = config.hf_config
    kinds = sorted(set(hf.layer_types))
    rotaries = {kind: Rotary(config, build, rope_of_type(hf, kind)) for kind in kinds}
    return [rotaries[kind] for kind in hf.layer_types]


def rope_of_type(hf: Any, kind: str) -> dict[str, Any]:
    """Raises ConfigError if there are none."""
    rope = (hf.rope_parameters or {}).get(kind)
    if not isinstance(rope, dict):
        raise ConfigError(
            f"rope_parameters.{kind}: must be an object, since layer_types has layers of this type",
            param=f"rope_parameters.{kind}",
        )
    return rope


def head_of(model: nn.Module, embeddings: Embedding) -> Embedding:
    """Return a model's own head, or the embeddings that it shares."""
    head: Embedding = getattr(model, "lm_head", embeddings)
    return head


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
    tensor_parallel: ClassVar[bool] = True
    """Whether ranks can divide its layers. A family that has others than those of `core.nn` which
    ranks divide, or does not add what they compute, says False."""
    pipeline_parallel: ClassVar[bool] = True
    """Whether stages can have its layers: all work is that of a decoder's that can."""
    taps: ClassVar[bool] = True
    """Whether speculators can read its layers' inputs, likewise."""
    batch_invariant: ClassVar[bool] = True
    """A family that multiplies or adds otherwise than by its operations says False."""
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
    ignored_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that no model of this family's in `transformers` reads, if a file has them."""

    takes_media: ClassVar[bool] = True
    """Whether rows of an encoder may stand in the place of embeddings, likewise."""
    takes_embeddings: ClassVar[bool] = True
    """Whether a request's embeddings may, likewise."""

    def __init_subclass__(cls) -> None:
        plain = cls.forward is HeadlessLM.forward
        for fact in FORWARD_FACTS:
            setattr(cls, fact, plain and getattr(cls.decoder, fact))

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        self.model = create(self.decoder, BlockParts(config, build, self.attention, self.mlp))
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
        context.shared.clear()  # A recorded step keeps its context, and no layer's tensors.
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

    logits_factor: float = 1.0
    """Of the product with the head."""
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
        if config.pooling is not None:
            return
        hf, last = config.hf_config, build.ranks.pipeline.last
        bias = self.head_bias(hf)
        if not hf.tie_word_embeddings:
            self.lm_head: Any = MissingLayer()
            if last:
                self.lm_head = Embedding(
                    config.vocab_size, config.hidden_size, build, bias=bias, shard="vocabulary"
                )
        elif bias:
            embeddings: Any = self.model.embed_tokens
            if last:
                embeddings.bias = nn.Parameter(build.empty(len(embeddings.weight)))
            place, own = "model.embed_tokens.bias", self.weight_map
            self.weight_map = replace(
                own, prefixes={"lm_head.bias": place, **own.prefixes}, ignored=(*own.ignored, place)
            )

    @staticmethod
    def head_bias(hf: Any) -> bool:
        """Return whether the head has a bias, tied or not."""
        return False

    @property
    def output_embeddings(self) -> Embedding:
        """The head: the model's own, or the embeddings that it shares."""
        return head_of(self, self.model.embed_tokens)

    def last_states(self, hidden: HiddenStates) -> torch.Tensor:
        """Rows of `forward`'s result, unchanged → states after the last norm, [num_rows,
        hidden_size]"""
        return self.pooling_states(self.model.finish(_copies(hidden)))

    def compute_logits(self, hidden: HiddenStates) -> torch.Tensor:
        """Rows of `forward`'s result → [num_rows, vocab_size]"""
        return self.output_embeddings.logits(
            self.model.finish(hidden), norm=self.model.norm, factor=self.logits_factor
        )


class TokenHead(HeadlessLM):
    """A decoder and a head that gives logits for each token."""

    classifies_tokens: ClassVar[bool] = True
    num_labels: ClassVar[int | None] = None
    """Number of logits; None: as the configuration says."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        assert config.pooling is not None, "a head of tokens is pooled"
        self.score: nn.Module = self.head(config.hidden_size, len(config.pooling.labels), build)
        # Older classes of `transformers` have another name for it.
        prefixes = {"classifier.": "score.", **self.weight_map.prefixes}
        self.weight_map = replace(self.weight_map, prefixes=prefixes)

    @staticmethod
    def head(size: int, num_labels: int, build: BuildContext) -> nn.Module:
        return Linear(size, num_labels, build, bias=True)

    def classify(self, states: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] → logits [num_rows, num_labels]"""
        logits: torch.Tensor = self.score(states)
        return logits


class RewardHead(nn.Sequential):
    """score.2(relu(score.0(state)))"""

    def __init__(self, size: int, num_labels: int, build: BuildContext) -> None:
        super().__init__(
            Linear(size, size, build, bias=True),
            nn.ReLU(),
            Linear(size, num_labels, build, bias=True),
        )


def classifier_of(name: str, model: type[CausalLM]) -> type[CausalLM]:
    """Return the architecture `name` of a family's class that generates: its decoder with a
    classifier of the last state, or with ForTokenClassification in its name of each."""
    head = TokenHead if name.endswith("ForTokenClassification") else DecoderClassifier
    return type(name, (head, model), {"__module__": model.__module__})


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
        head = head_of(self, self.model.embed_tokens)
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
        """Return the token ids. Raises ConfigError if a text is not one token."""
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
