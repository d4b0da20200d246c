"""How a recorded step ends: what follows its forward pass, and for which numbers of rows."""

from __future__ import annotations

import enum

import torch

from ..sampling.sampler import Sampler
from .written_tokens import WrittenTokens


class Ending(enum.StrEnum):
    """The work of a recorded step after the forward pass."""

    PLAIN = "plain"
    """Sample rows that ask for a temperature at most."""
    FULL = "full"
    """Sample rows that ask for anything that the kernels do (`Sampler.recordable`)."""
    LOGITS = "logits"
    """Sampling by separately launched kernels, for example if a grammar's mask is awaited."""
    STATES = "states"
    """None: hidden states go to the next stage of the pipeline."""

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled in the recorded step."""
        return self in (Ending.PLAIN, Ending.FULL)


def row_counts(max_num_seqs: int) -> list[int]:
    """Numbers of rows to record: fine where steps are short, within 1/8 elsewhere."""
    counts = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 64)]
    return [n for n in counts if n < max_num_seqs] + [max_num_seqs]


def sample_rows(
    sampler: Sampler,
    ending: Ending,
    logits: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    written: WrittenTokens | None = None,
) -> None:
    """Do what this ending of a recorded step does with the logits; results go to
    `sampler.outputs`, and tokens to `written`, too."""
    out = sampler.outputs.first(logits.shape[0])
    if ending is Ending.PLAIN:
        (sampler.shard or sampler).sample_plain(logits, slots, lengths, out)
    else:
        sampler.sample_step(logits, slots, lengths, out)
    if written is not None:
        written.write(out.chosen)


def count_run(ending: Ending, written: WrittenTokens | None) -> None:
    """Note that a step with this ending was launched or replayed, with its `sample_rows`."""
    if written is not None and ending.samples:
        written.ran()


def recorded_endings(sampler: Sampler, samples: bool) -> list[Ending]:
    """Return the endings to record, the most useful first. samples: this stage does."""
    return [*sampling_endings(sampler), Ending.LOGITS] if samples else [Ending.STATES]


def sampling_endings(sampler: Sampler) -> list[Ending]:
    """Return the endings that sample, on the device of this sampler."""
    return [Ending.PLAIN, Ending.FULL] if sampler.recordable([]) else [Ending.PLAIN]
