"""The kit, with a head of random weights; and drafts that are known beforehand."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from heads import write_head

from jackfield.core.protocols import KnownTokens
from jackfield.plugins.conformance.speculators import LikeliestRows, SpeculatorKit

FOLDER = tempfile.TemporaryDirectory()
write_head(Path(FOLDER.name))


class TestConformance(SpeculatorKit):
    """Every test of the kit."""

    name = "chained_head"
    own_options = {"model": FOLDER.name}


class Following(SpeculatorKit):
    name = "chained_head"


def test_each_draft_goes_on_from_the_one_before(tmp_path: Path) -> None:
    """A head that knows one rule, three tokens further: its drafts are 3, 6 and 9 further."""
    Following.own_options = {"model": str(write_head(tmp_path, follows=3))}
    speculator = Following().make(3)
    newest, rows = torch.tensor([7, 10, 20, 30]), torch.arange(4)
    lengths = torch.ones_like(rows)
    drafts = speculator.propose(
        KnownTokens(newest[:, None].int(), rows, lengths, torch.randn(4, 192),
                    LikeliestRows(lengths))
    )  # fmt: skip
    assert torch.equal(drafts.token_ids, newest[:, None] + torch.tensor([3, 6, 9]))
    assert drafts.counts.tolist() == [3] * 4
