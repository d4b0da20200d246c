"""Shared fixtures: tiny random checkpoints, made once a session."""

from __future__ import annotations

import os

# More threads than idle cores make every small operation wait for the slowest; set before torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> str:
    """Where engine tests run."""
    return "cuda" if torch.cuda.is_available() else "cpu"
