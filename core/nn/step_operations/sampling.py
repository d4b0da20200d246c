"""Operations that choose tokens: a part of `Operations`. Only masks have a form in torch here."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch


class SlotTables(NamedTuple):
    """The slots' tables that sampling reads, on the device, at constant addresses."""

    settings: torch.Tensor
    """[slots, columns] int32 (core/worker/sampling/sampling_columns.py)"""
    counts: torch.Tensor
    """[slots, vocab_size] int16: times a token was generated; the sign bit: the prompt has it.
    Kept for slots with `Flag.PENALTIES`."""
    allowed: torch.Tensor
    """[slots, ceil(vocab_size / 32)] int32: token i may come next if bit i % 32 of word i // 32 is
    on. Read for slots with `Flag.ALLOWED`, kept for those with `Flag.BANS`."""
    history: torch.Tensor
    """[slots, positions] int32: tokens; the chosen one is written at its position."""


class SampleOutputs(NamedTuple):
    """Destination of a step's sampled tokens; may have more rows than the step."""

    chosen: torch.Tensor
    """[rows] int32; -1: no token can be chosen"""
    top_ids: torch.Tensor
    """[rows, 20] int32, most likely first, lower ids first among equals"""
    top_logprobs: torch.Tensor
    """[rows, 20] float32"""
    logprob: torch.Tensor
    """[rows] float32, of the chosen token"""
    rank: torch.Tensor
    """[rows] int32, of the chosen token: 1 + the number of more likely ones"""

    def first(self, num_rows: int) -> SampleOutputs:
        """Return views of the first `num_rows` rows."""
        return SampleOutputs(*(part[:num_rows] for part in self))


class GrammarBits(NamedTuple):
    """The allowed tokens of a step's constrained rows."""

    bits: torch.Tensor
    """[count, ceil(vocab_size / 32)] int32, as `SlotTables.allowed`"""
    places: torch.Tensor
    """[R] int64: index of each row's bits; -1: not constrained"""


class SamplingOperations:
    """Sampling on the device, in launches that a graph can contain."""

    name: ClassVar[str]
    samples: ClassVar[bool] = False
    """Whether `sample` and `edit_logits` are implemented; otherwise torch samples."""
    writes_tokens: ClassVar[bool] = False
    """Whether `write_tokens` is implemented; otherwise tokens are copied to the host."""

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        tables: SlotTables,
        out: SampleOutputs,
        *,
        plain: bool,
        grammar: GrammarBits | None = None,
        skip: int = 0,
    ) -> None:
        """Choose a token for each row, as `Sampler` (core/worker/sampling/sampler.py) specifies,
        and update its history and the slot's tables. The launches are the same for any rows, so
        that a graph can contain them.

        logits: [R, vocab_size], not changed; slots, lengths: [R] int64; plain: no row needs more
        than a temperature; skip: flags (`Flag` in sampling_columns.py, same folder) that no row has
        in this step. Rows with `Flag.FORCED`: the token `lengths` is scored.
        """
        raise NotImplementedError(f"operations {self.name!r} have no sampling (`samples`)")

    def sample_parts(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        tables: SlotTables,
        first: int,
    ) -> torch.Tensor:
        """The first half of a plain `sample`, for the tokens from `first` on: the best scores of
        parts of them.

        logits: [R, tokens], not changed; slots, lengths: [R] int64 → [R, 2, parts] int32: the bits
        of each part's best score in float32, +inf for NaN, and its token. Feature:
        "sample_parts.tokens".
        """
        raise NotImplementedError(f"operations {self.name!r} have no sampling (`samples`)")

    def sample_best(
        self,
        best: torch.Tensor,
        token: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        tables: SlotTables,
        out: SampleOutputs,
    ) -> None:
        """The second half: choose the token with the best score, the lowest among equals, as
        `sample` does. best: [R, parts] float32; token: [R, parts] int32, both contiguous."""
        raise NotImplementedError(f"operations {self.name!r} have no sampling (`samples`)")

    def edit_logits(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        tables: SlotTables,
        out: torch.Tensor,
        *,
        edits: int,
        scale: bool,
        grammar: GrammarBits | None = None,
    ) -> None:
        """Apply the part of `sample` that precedes a plugin's logits processor.

        logits, out: [R, vocab_size], out float32, may be the same; edits: flags of the edits to
        apply; scale: divide by the temperature, after them.
        """
        raise NotImplementedError(f"operations {self.name!r} have no sampling (`samples`)")

    def write_tokens(
        self, chosen: torch.Tensor, runs: torch.Tensor, ring: torch.Tensor, last: int
    ) -> None:
        """Count a run: runs + 1, or 0 after `last`; and write it, and the tokens, to its place in
        the ring, the run modulo its length. A launch that a graph can contain.

        chosen: [R] int32; runs: [1] int32; ring: [places, 1 + R or more] int32, in pinned memory of
        the host if the others are on a GPU.
        """
        raise NotImplementedError(f"operations {self.name!r} write no tokens (`writes_tokens`)")

    def mask_tokens(
        self, logits: torch.Tensor, bits: torch.Tensor, rows: torch.Tensor | None
    ) -> None:
        """Set logits to -inf, in place, where a token's bit is off.

        logits: [R, vocab_size], any float dtype; bits: [count, ceil(vocab_size / 32)] int32, token
        i at bit i % 32 of word i // 32; rows: [count] int64, all different; None: row by row.
        """
        shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
        off = (bits.unsqueeze(-1) >> shifts).bitwise_and_(1).logical_not().flatten(1)
        off = off[:, : logits.shape[1]]
        if rows is None:
            logits.masked_fill_(off, float("-inf"))
        else:
            logits[rows] = logits[rows].masked_fill(off, float("-inf"))
