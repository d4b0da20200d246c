"""Parameters of pooling requests, and their results: `PoolingParams → … → PoolingOutput`.

The sibling of `types.py` for models that give vectors and no tokens.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict

import msgspec
import numpy as np

from .errors import InvalidRequest

PoolingTask: TypeAlias = Literal["embed", "classify", "score", "token_embed", "token_classify"]
POOLING_TASKS: tuple[PoolingTask, ...] = (
    "embed", "classify", "score", "token_embed", "token_classify",
)  # fmt: skip
TOKEN_TASKS: tuple[PoolingTask, ...] = ("token_embed", "token_classify")
"""Tasks with a result for each token."""
PoolingType: TypeAlias = Literal["CLS", "LAST", "MEAN"]


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to pool a prompt's hidden states. Names are vLLM's.

    Raises `InvalidRequest` with the field's name when a value is out of range.
    """

    task: PoolingTask | None = None
    """embed: one vector; classify: a probability per label; score: the one number of a
    cross-encoder; token_embed: a vector per token; token_classify: for each token a probability per
    label, or a reward. None: the model's own task."""
    normalize: bool | None = None
    """Scale vectors to length 1 (embed, token_embed); None: as the checkpoint says."""
    dimensions: int | None = None
    """Keep only this many leading numbers of each vector, for models trained for it
    (Matryoshka)."""
    activation: bool | None = None
    """Softmax or sigmoid on a classifier's logits (classify, score, token_classify); None: as the
    checkpoint says."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many leading tokens of the prompt, special tokens of a text included; -1: as
    many as the model takes. None: longer prompts are refused."""

    def __post_init__(self) -> None:
        def refuse(param: str, expected: str) -> None:
            raise InvalidRequest(
                f"{param} must be {expected}, got {getattr(self, param)!r}", param=param
            )

        if self.task is not None and self.task not in POOLING_TASKS:
            refuse("task", f"one of {', '.join(POOLING_TASKS)}")
        for name in ("normalize", "activation"):
            if not isinstance(getattr(self, name), bool | None):
                refuse(name, "true or false")
        for name, least in (("dimensions", 1), ("truncate_prompt_tokens", -1)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                refuse(name, "an integer")
            if value < least or value == 0 or value >= 2**31:
                refuse(name, f"{'-1 or ' if least < 0 else ''}positive, at most {2**31 - 1}")


class TextPair(TypedDict):
    """Two texts for a cross-encoder, in the order in which it was trained to see them."""

    text: str
    text_pair: str


class PooledRow(msgspec.Struct, frozen=True):
    """One request's result, in the form that the worker sends."""

    shape: tuple[int, ...]
    data: bytes
    """Float32 in the machine's byte order."""

    def array(self) -> np.ndarray:
        """A read-only view of `data`, `shape`."""
        return np.frombuffer(self.data, dtype=np.float32).reshape(self.shape)


class PoolingOutput(msgspec.Struct, frozen=True):
    """The numbers of one request."""

    data: np.ndarray
    """Float32, read-only. embed: [dimensions]; classify: [num_labels]; score: [1]; token_embed:
    [num_prompt_tokens, dimensions]; token_classify: [num_prompt_tokens, num_labels], or with STEP
    pooling those of the steps' tokens."""

    @property
    def embedding(self) -> list[float]:
        """As a list: [dimensions]."""
        return self._flat()

    @property
    def probs(self) -> list[float]:
        """As a list: [num_labels]."""
        return self._flat()

    @property
    def num_classes(self) -> int:
        return len(self.data)

    @property
    def score(self) -> float:
        """The one number of a cross-encoder. Raises ValueError when there are more."""
        return float(self.data.item())

    def _flat(self) -> list[float]:
        values: list[float] = self.data.tolist()
        return values
