"""How one model's hidden states become vectors, and what requests may choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from ..errors import InvalidRequest
from ..pooling_params import PoolingParams, PoolingTask, PoolingType
from .sentence_transformer import Projection

Activation = Literal["sigmoid", "softmax"]


@dataclass(frozen=True)
class TokenClassifier:
    """A language model that answers a question with a token, read as a classifier.

    `difference`: two tokens, no and yes; the one logit is yes minus no, whose sigmoid is the
    softmax over both. Otherwise a logit a token.
    """

    tokens: tuple[str, ...]
    difference: bool


@dataclass(frozen=True)
class PoolingConfig:
    """The pooling of one model."""

    task: Literal["embed", "classify"]
    causal: bool
    """False: an encoder; prompts run whole, nothing is cached."""
    pooling_type: PoolingType
    size: int
    """Numbers of a whole vector."""
    normalize: bool = True
    """Embeddings have length 1 unless a request says otherwise."""
    lower_case: bool = False
    """Texts are put in lower case before they are tokenized."""
    projections: tuple[Projection, ...] = ()
    """What embeddings go through before they are cut and scaled; vectors a token do not."""
    num_token_types: int = 0
    """Number of texts that the model distinguishes in one prompt; below 2: it does not."""
    matryoshka: tuple[int, ...] | None = None
    """Lengths that vectors may be cut to; empty: any; None: they may not be cut."""
    labels: tuple[str, ...] = ()
    """A classifier's, in the order of its logits."""
    activation: Activation = "softmax"
    activates: bool = True
    """Whether classifiers' logits go through `activation` unless a request says otherwise."""
    tokens: TokenClassifier | None = None
    """Tokens whose output weights form the classifier, if made from a language model's head."""
    joins_pairs: bool = False
    """Two texts become one, without the tokenizer's marks between them."""

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """The tasks that a request may have, the default first."""
        if self.task == "embed":
            return ("embed", "token_embed")
        return ("classify", "score") if len(self.labels) == 1 else ("classify",)

    @property
    def scores(self) -> bool:
        """Whether two texts can be compared: by cosine, or by a classifier with one label."""
        return self.task == "embed" or len(self.labels) == 1

    def completed(self, params: PoolingParams) -> PoolingParams:
        """Return parameters with defaults filled in. Raises InvalidRequest for what this model
        cannot do."""
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
