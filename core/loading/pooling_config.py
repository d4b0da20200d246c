"""How a model's hidden states become vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from ..errors import InvalidRequest
from ..pooling_params import TOKEN_TASKS, PoolingParams, PoolingTask, PoolingType
from .sentence_transformer import Projection

Activation = Literal["sigmoid", "softmax"]


@dataclass(frozen=True)
class TokenClassifier:
    """A language model that answers with a token, as a classifier.

    `difference`: tokens no and yes; the logit is yes minus no, whose sigmoid is their softmax.
    Otherwise a logit per token.
    """

    tokens: tuple[str, ...]
    difference: bool


@dataclass(frozen=True)
class PoolingConfig:
    """The pooling of one model."""

    task: Literal["embed", "classify", "token_classify", "token_embed"]
    causal: bool
    """False: an encoder, with whole prompts and no cache."""
    pooling_type: PoolingType
    size: int
    """Numbers of a whole vector."""
    normalize: bool = True
    """Embeddings have length 1 by default."""
    lower_case: bool = False
    """Texts are lower-cased first."""
    projections: tuple[Projection, ...] = ()
    """Applied to embeddings before truncation and scaling, not to vectors per token."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Name of a kind of text → what its model wants before it. Callers write it."""
    num_token_types: int = 0
    """Number of texts distinguished in a prompt; below 2: none."""
    matryoshka: tuple[int, ...] | None = None
    """Permitted vector lengths; empty: any; None: no truncation."""
    labels: tuple[str, ...] = ()
    """A classifier's, in the order of logits."""
    each_token: bool = False
    """Each token has a result by default."""
    classifies_tokens: bool = False
    """Whether there are logits per token, besides vectors."""
    step_token_id: int | None = None
    """Of results per token, those at this token of the prompt alone; None: at all."""
    returned_labels: tuple[int, ...] | None = None
    """Of logits per token, those of these labels alone, before the activation; None: all."""
    activation: Activation = "softmax"
    activates: bool = True
    """Whether `activation` applies to classifiers' logits by default."""
    tokens: TokenClassifier | None = None
    """Tokens whose output weights form the classifier."""
    joins_pairs: bool = False
    """Two texts are joined without marks."""

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """Possible tasks, the default first."""
        if self.task in TOKEN_TASKS:
            return (self.task,)
        if self.task == "embed":
            tasks: tuple[PoolingTask, ...] = ("embed", "token_embed")
            tasks = tasks[::-1] if self.each_token else tasks
            return (*tasks, "token_classify") if self.classifies_tokens else tasks
        return ("classify", "score") if len(self.labels) == 1 else ("classify",)

    @property
    def scores(self) -> bool:
        """Whether two texts can be compared: by vectors, or a one-label classifier."""
        return self.compares or (self.task == "classify" and len(self.labels) == 1)

    @property
    def compares(self) -> bool:
        """Whether they are by vectors of their own."""
        return self.task in ("embed", "token_embed")

    def completed(self, params: PoolingParams) -> PoolingParams:
        """Return parameters with defaults. Raises InvalidRequest for what this model cannot do."""
        task = params.task or self.tasks[0]
        if task not in self.tasks:
            raise InvalidRequest(
                f"task: {task!r} is not what this model does ({', '.join(self.tasks)})",
                param="task",
            )
        embeds = task in ("embed", "token_embed")
        for name, fits in (
            ("normalize", embeds), ("dimensions", embeds), ("activation", not embeds)
        ):  # fmt: skip
            if getattr(params, name) is not None and not fits:
                raise InvalidRequest(f"{name}: has no meaning for task {task!r}", param=name)
        self._check_dimensions(params.dimensions)
        return msgspec.structs.replace(
            params,
            task=task,
            normalize=embeds and (self.normalize if params.normalize is None else params.normalize),
            activation=not embeds
            and (self.activates if params.activation is None else params.activation),
        )

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is None or (dimensions == self.size and self.matryoshka is None):
            return
        if self.matryoshka is None:
            raise InvalidRequest(
                f"dimensions: this model's vectors cannot be cut, they have {self.size} numbers "
                "(its config.json has neither is_matryoshka nor matryoshka_dimensions)",
                param="dimensions",
            )
        supported = dimensions in self.matryoshka if self.matryoshka else dimensions <= self.size
        if not supported:
            some = ", ".join(map(str, self.matryoshka)) or f"1 to {self.size}"
            raise InvalidRequest(
                f"dimensions: {dimensions} is not one of this model's ({some})", param="dimensions"
            )
