"""The contracts of models and of checkpoint configurations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypeAlias,
    runtime_checkable,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from ..loading.model_config import ModelConfig
    from ..nn.context import BuildContext, EncodeContext, ForwardContext
    from ..parts.encoder_decoder import FeatureShape
    from .audio import AudioSource
    from .field_kinds import FieldKind

HiddenStates: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"
"""[num_tokens, hidden_size]; or tensors with one row per token each, where `compute_logits` goes on
with what the last layer has not finished."""


@runtime_checkable
class Model(Protocol):
    """An architecture, composed of `core.nn` blocks. Subclasses `torch.nn.Module`.

    `weight_map` is data: which checkpoint names stack into which parameter
    (`core.loading.weight_map`). A class with `tensor_parallel` true, or one that inherits it, can
    be divided among the ranks of `build.ranks`: its layers say what ranks divide, and sums are
    added over ranks (`Ranks.add`). One with `pipeline_parallel` true has the layers of
    `build.ranks.pipeline` alone and `MissingLayer` in the place of other modules, and begins with
    `context.incoming`, if that is there, instead of token ids: what `forward` returned on the stage
    before, of this stage's `incoming_size` (an attribute; without it, the hidden size).
    """

    weight_map: ClassVar[Any]
    config_fields: ClassVar[Mapping[str, FieldKind]]
    """Kinds of the fields of config.json that the family has of its own (`protocols.field_kinds`):
    a wrong value is refused by its name before anything is built. Those of base classes count, too.
    Optional."""
    taps: ClassVar[bool]
    """Whether `forward` passes each layer's input to `context.taps`, if that is there. Optional;
    without it, false, and speculators that read them do not serve it."""
    batch_invariant: ClassVar[bool]
    """Whether it has no products, sums or exponentials but those of its operations and its
    attention backend, so that the engine may promise `EngineConfig.batch_invariant` if these do.
    Optional; without it, false."""
    graph_safe: ClassVar[bool]
    """False: steps are launched, never recorded, because `forward` may wait for the device.
    Optional; without it, true."""

    @classmethod
    def context_length(cls, hf_config: Any) -> int | None:
        """Return the length of text that the configuration states; None if it states none.
        Optional; without it, `max_position_embeddings`."""

    @classmethod
    def vocabulary_size(cls, hf_config: Any) -> int:
        """Return the number of tokens that the model reads and writes, the first of those that the
        configuration counts. Optional; without it, `vocab_size`."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """Create parameters (uninitialised) on `build.device` in `build.dtype`."""

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> HiddenStates:
        """input_ids: [num_tokens] int64 → hidden states [num_tokens, hidden_size], or a tuple of
        tensors with one row per token each.

        Work that only `compute_logits` needs (the last norm, the last MLP) belongs there, because
        it gets few rows.
        """

    def compute_logits(self, hidden: HiddenStates) -> torch.Tensor:
        """hidden: [num_rows, hidden_size], or a tuple as `forward` returned, of some rows; may be
        overwritten → logits [num_rows, vocab_size], any float dtype."""

    def last_states(self, hidden: HiddenStates) -> torch.Tensor:
        """hidden: as `compute_logits` gets it, not to be overwritten → states after the final norm,
        [num_rows, hidden_size]. Optional; for speculators that read them."""

    def after_loading(self) -> None:
        """Derive weights from others; called once, when every parameter is filled. Optional;
        modules inside the model may have one, too, and are called before their parents."""


class EncoderDecoderModel(Model, Protocol):
    """A `Model` whose decoder attends to what an encoder has read, the request's source.

    A class with `encode` is one. The decoder's layers attend to the source by
    `core.nn.encoder.SourceAttention`, one for each `Attention`, of the same head sizes.
    """

    source_shape: FeatureShape
    """Of a model whose encoder reads features of audio. Optional; without it, it reads tokens."""

    @classmethod
    def audio_source(cls, config: ModelConfig, generation: Mapping[str, Any]) -> AudioSource:
        """Return what makes features of audio. Only models with `source_shape`. generation: what
        generation_config.json says. Raises ConfigError."""

    def encode(self, source: torch.Tensor, context: EncodeContext) -> None:
        """Encode sources, and write their keys and values (`SourceAttention.write`).

        source: [num_source_tokens] int64, several sources one after the other (`context.rows`);
        with `source_shape`: [num_sources, channels, frames] float32."""


class PoolingModel(Protocol):
    """An architecture whose hidden states are pooled to vectors. A `Model` may be one, too.

    The methods of a class determine its use: with `compute_logits` it generates, with
    `pooling_states` it can be pooled, with `classify` it is a classifier.
    """

    classifies_tokens: ClassVar[bool]
    """Whether `classify` is for the states of each token, as for rewards of steps. Optional;
    without it, false."""
    embeds: ClassVar[bool]
    """Whether a classifier of tokens gives vectors of whole prompts, too. Optional; without it,
    false."""
    embeds_tokens: ClassVar[bool]
    """Whether there are vectors of tokens, and none of whole prompts: two texts are compared by the
    sum, over the first one's tokens, of the greatest product with one of the second. Optional;
    without it, false."""
    num_labels: ClassVar[int | None]
    """Number of a classifier's logits; None, or without it: as the configuration says. Optional."""
    activates: ClassVar[bool]
    """Whether logits become probabilities by default. Optional; without it, as the configuration
    says."""

    weight_map: ClassVar[Any]
    config_fields: ClassVar[Mapping[str, FieldKind]]
    """As `Model`."""
    causal: ClassVar[bool]
    """False: an encoder. Each prompt runs whole in one step, `context.backend` is None and
    nothing is cached. Optional; without it, true."""
    pooling_type: ClassVar[Literal["CLS", "LAST", "MEAN"]]
    """Default pooling type of checkpoints that set none. Optional; without it, LAST."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """As `Model`. `config.pooling` is set, and modules that only generation needs are not
        created."""

    @classmethod
    def context_length(cls, hf_config: Any) -> int:
        """Return the maximum length of a prompt. Optional; without it, as in the configuration."""

    @classmethod
    def pooling_type_of(cls, hf_config: Any) -> Literal["CLS", "LAST", "MEAN"]:
        """Return the default where a configuration decides it. Optional; without it,
        `pooling_type`."""

    @classmethod
    def classifier_method(cls, hf_config: Any) -> str | None:
        """Return what `method` is in a configuration that makes a classifier from tokens
        (`classifier_from_token`) and does not state it: "from_2_way_softmax" or
        "no_post_processing"; None: such a configuration is refused. Only classifiers. Optional;
        without it, None."""

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """input_ids: [num_tokens] int64 → hidden states [num_tokens, hidden_size]."""

    def pooling_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [any, hidden_size], rows of `forward`'s result → states to pool, same shape."""

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """pooled: [num_rows, hidden_size] → logits [num_rows, num_labels]. Only classifiers."""

    def result_tokens(self, task: str, token_ids: Sequence[int]) -> slice:
        """Return the tokens of a prompt that have results, of a task with one for each. Optional;
        without it, all."""

    def token_vectors(self, states: torch.Tensor) -> torch.Tensor:
        """states: [num_tokens, hidden_size] → vectors of the tokens [num_tokens, size]. Optional;
        without it, the states themselves."""


class CheckpointConfig(Protocol):
    """The contents of config.json, for one model type. Its attributes have the file's names;
    `vocab_size`, `architectures`, `num_hidden_layers`, `hidden_size` and `num_attention_heads` are
    needed by all models that generate, others by the model itself."""

    config_fields: ClassVar[Mapping[str, FieldKind]]
    """As `Model`, for what `from_dict` reads: checked before it is called, and first where the
    model's class has another kind. Optional."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> CheckpointConfig:
        """Build from config.json, with defaults for missing fields. Raises ValueError or TypeError
        for invalid ones."""


@dataclass(frozen=True)
class PlainConfig:
    """A model type of `transformers` whose config.json states nearly all values that models read:
    registered in place of a configuration class, it spares a start the import of `transformers`.

    A file with another field, or with a value of another type, is read by `transformers`.
    """

    fields: Mapping[str, tuple[type, ...]]
    """Name → exact types, as `transformers` validates them or narrower."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of `transformers` for fields that checkpoints omit and models read."""
    derived: frozenset[str] = frozenset()
    """Fields that follow from the others where they are missing: head_dim, num_key_value_heads."""
