"""Shared fixtures: tiny random checkpoints, created once per session."""

from __future__ import annotations

import functools
import gc
import os
import signal
import ssl
import sys
from collections.abc import Generator
from typing import Any

# More threads than idle cores make every small operation wait for the slowest; set before torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import pytest
import torch
from installing import install as install
from installing import remember_entry_points
from interpreter import quicken
from nights import mark_combinations, mark_repeats

# httpx's default of 5 s is too short for a busy machine; only a hang should fail.
_timeout = httpx.post.__kwdefaults__["timeout"]  # One object, shared by all of httpx's defaults.
_timeout.connect = _timeout.read = _timeout.write = _timeout.pool = 300.0
# This file may be imported twice.
_create_context = getattr(ssl.create_default_context, "__wrapped__", ssl.create_default_context)


@functools.cache
def _context_of(cafile: str, changed: int) -> ssl.SSLContext:
    return _create_context(cafile=cafile)


def _shared_context(*arguments: Any, **options: Any) -> ssl.SSLContext:
    """As ssl's own, but with one context for each file of authorities: each client of httpx, and
    each request without one, would read it again, which takes longer than most requests here."""
    if not arguments and options.keys() == {"cafile"} and options["cafile"] is not None:
        return _context_of(options["cafile"], os.stat(options["cafile"]).st_mtime_ns)
    return _create_context(*arguments, **options)


_shared_context.__wrapped__ = _create_context  # type: ignore[attr-defined]
ssl.create_default_context = _shared_context
remember_entry_points()

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Schemathesis' plugin takes a second of each pytest that a test starts, too.
if "no:schemathesis" not in (options := os.environ.get("PYTEST_ADDOPTS", "")):
    os.environ["PYTEST_ADDOPTS"] = f"{options} -p no:schemathesis".lstrip()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A script's background ignores it, and what a test starts would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect no garbage while modules are imported and tests collected, and leave both out of
    later collections, the first of which would otherwise look at all of torch and each test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_repeats(items)
    if not torch.cuda.is_available():
        mark_combinations(items)


@pytest.fixture(scope="session")
def device() -> str:
    """Device on which engine tests run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", autouse=True)
def settled() -> None:
    """Leave what is imported and collected so far out of garbage collections: each engine that
    stops makes one, which would otherwise look at all of torch and `transformers`."""
    _leave_out_imports()


_imported = 0
"""Modules when the last were left out of garbage collections."""


def _leave_out_imports() -> None:
    global _imported
    gc.collect()
    gc.freeze()
    _imported = len(sys.modules)


_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
"""Without a GPU torch's own notes a traceback for each kind of device that there could be."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test and its fixtures draw does not depend on the tests before it."""
    _seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """What the first test that needs it imports, as models of `transformers`, is left out too."""
    if len(sys.modules) > _imported + 20:
        _leave_out_imports()
