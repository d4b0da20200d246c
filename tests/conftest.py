"""Shared fixtures: tiny random checkpoints, made once a session."""

from __future__ import annotations

import os

# More threads than idle cores make every small operation wait for the slowest; set before torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import pytest
import torch
from installing import install as install

# A client's default of 5 s is less than a busy machine may take; only what hangs is to fail.
_timeout = httpx.post.__kwdefaults__["timeout"]  # One object, which all of httpx's defaults are.
_timeout.connect = _timeout.read = _timeout.write = _timeout.pool = 300.0

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> str:
    """Where engine tests run."""
    return "cuda" if torch.cuda.is_available() else "cpu"
