"""The contract of grammar backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    import numpy as np


class GrammarSpec(msgspec.Struct, frozen=True):
    """A constraint on an output, in canonical form; the key of the grammar cache."""

    kind: Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
    text: str = ""
    """json, structural_tag: JSON text; choice: a JSON list of strings; json_object: empty."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The vocabulary of a grammar."""

    token_bytes: list[bytes]
    """[size] Bytes that each id adds to a text; empty for special tokens and ids without a token,
    which no grammar allows."""
    size: int
    """The model's vocab_size, which may be larger than the tokenizer's."""
    eos_token_ids: tuple[int, ...]
    """End tokens: allowed only where a grammar may end. At least one."""
    encode: Callable[[str], list[int]]
    """Text to token ids, without special tokens."""
    compact_json: bool = False
    """Whether JSON has a single form: no whitespace but one space after each comma and colon."""
    special_tokens: Mapping[str, int] = {}
    """Text of each special token → its id. Structural tags may name them in the text around their
    contents; they are allowed nowhere else."""


class GrammarMatcher(Protocol):
    """State of one output in a grammar. Used by one thread at a time."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance by these tokens. Returns False if the grammar does not allow them.

        Raises RuntimeError if the grammar exceeds the backend's limits.
        """

    def fill_bitmask(self, row: np.ndarray) -> None:
        """Write the mask of allowed next tokens. Not called after an end token was accepted.

        row: [ceil(size / 32)] int32, contiguous; bit i % 32 of word i // 32 is token i. Every bit
        is written, those past `size` too (as 0). Raises RuntimeError as `accept` does.
        """

    @classmethod
    def fill_bitmasks(
        cls, matchers: Sequence[Any], bits: np.ndarray, rows: Sequence[int]
    ) -> list[Exception | None]:
        """Fill many masks at once, bits[rows[i]] by matchers[i]; return for each the error that
        `fill_bitmask` would raise.

        bits: [count, ceil(size / 32)] int32, contiguous. Optional: without it, threads of the
        worker share the rows. With it, all masks of a step take one call, which should release the
        interpreter lock once and use more than one core.
        """

    @classmethod
    def accept_each(
        cls, matchers: Sequence[Any], token_ids: Sequence[int]
    ) -> Sequence[bool | Exception]:
        """Advance many matchers at once, matchers[i] by one token, token_ids[i]; return for each
        what `accept` would return or raise. A matcher that did not accept is not used again.
        Optional, as `fill_bitmasks` is.
        """

    def is_terminated(self) -> bool:
        """Return whether an end token was accepted."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens. Optional: a matcher need not have it."""

    def forced_text(self) -> str:
        """Return text that must come next, or less of it. Optional: its tokens become drafts."""


class Grammar(Protocol):
    """A compiled grammar, shared by requests."""

    def matcher(self) -> GrammarMatcher:
        """Return a new matcher in the initial state."""


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary."""

    bounded: ClassVar[bool]
    """Whether `compile` and `fill_bitmask` take little time and memory for any input. Such a
    backend is tried first for costly grammars, and compiles short ones without a sandbox. All other
    grammars that are not provably small are first compiled in a separate process: so the class must
    be importable by its module and qualified name."""

    @classmethod
    def unavailable(cls) -> str | None:
        """Return None if it can be used here, else the reason, in one clause."""

    @classmethod
    def refusal(cls, spec: GrammarSpec) -> str | None:
        """Return why it cannot enforce this grammar, in one clause; None if it may try."""

    def __init__(self, vocabulary: Vocabulary) -> None: ...

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Compile a grammar, on a thread of a pool. Raises ValueError describing the error in the
        grammar."""
