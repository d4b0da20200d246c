"""How a recorded step ends, after its forward pass."""

from __future__ import annotations

import enum

import torch

from ..sampling.sampler import Sampler
from .written_tokens import WrittenTokens


class Ending(enum.StrEnum):
    """Work of a recorded step after its forward pass."""

    PLAIN = "plain"
    """Sample rows with at most a temperature."""
    FULL = "full"
    """Sample rows with anything that kernels do (`Sampler.recordable`)."""
    LOGITS = "logits"
    """Sample by separate launches, e.g. if a mask is awaited."""
    STATES = "states"
    """Nothing: states go to the next stage."""

    @property
    def samples(self) -> bool:
        return self in (Ending.PLAIN, Ending.FULL)


def row_counts(max_num_seqs: int) -> list[int]:
    """Return numbers of rows to record: dense for short steps, within 1/8 elsewhere."""
    counts = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 64)]
    return [n for n in counts if n < max_num_seqs] + [max_num_seqs]


def shared_row_counts(max_num_seqs: int) -> list[int]:
    """Return numbers of rows to record where rows share a prefix: few, as traffic waits for these
    recordings."""
    return [
        n for n in row_counts(max_num_seqs) if n in (8, 16, 32) or not n % 64 or n == max_num_seqs
    ]


def sample_rows(
    sampler: Sampler,
    ending: Ending,
    logits: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    written: WrittenTokens | None = None,
) -> None:
    """Do the ending's work on logits; results go to `sampler.outputs`, and tokens to `written`,
    too.
    """
    out = sampler.outputs.first(logits.shape[0])
    if ending is Ending.PLAIN:
        (sampler.shard or sampler).sample_plain(logits, slots, lengths, out)
    else:
        sampler.sample_step(logits, slots, lengths, out)
    if written is not None:
        written.write(out.chosen)


def count_run(ending: Ending, written: WrittenTokens | None) -> None:
    """Count a run of `sample_rows`."""
    if written is not None and ending.samples:
        written.ran()


def recorded_endings(sampler: Sampler, samples: bool) -> list[Ending]:
    """Return the endings to record, in order. samples: this stage does."""
    return [*sampling_endings(sampler), Ending.LOGITS] if samples else [Ending.STATES]


def sampling_endings(sampler: Sampler) -> list[Ending]:
    return [Ending.PLAIN, Ending.FULL] if sampler.recordable([]) else [Ending.PLAIN]
