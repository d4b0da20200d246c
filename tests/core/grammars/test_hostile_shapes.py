"""Grammars that are made to end the process which compiles them: it lives, whatever comes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRY = Path(__file__).with_name("try_shapes.py")
SCALES = [(), (8,)]
"""With the default limits, and with none: then all that is left is the sandbox."""


def outcomes(backend: str, seed: int, *rest: int) -> list[dict[str, Any]]:
    """In a process of their own. Fails where that has not come to the end of all."""
    count = rest[0]
    pytest.importorskip(backend)
    completed = subprocess.run(
        [sys.executable, TRY, backend, *map(str, (seed, *rest))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    lines = [json.loads(line) for line in completed.stdout.splitlines()]
    assert completed.returncode == 0, f"{len(lines)} of {count}: {completed.stderr[-2000:]}"
    assert len(lines) == count
    return lines


@pytest.mark.parametrize("scale", SCALES)
def test_hostile_shapes_are_served_or_refused(scale: tuple[int, ...]) -> None:
    """Few of them, and llguidance's process starts in a moment; the rest is tried nightly."""
    lines = outcomes("llguidance", 3, 12, *scale)
    refusals = [line["refusal"] for line in lines if line["refusal"] is not None]
    assert all(refusals) and 5 < len(refusals) < 12
    limited = [refusal for refusal in refusals if "max_grammar_references" in refusal]
    crashed = [refusal for refusal in refusals if "crashes" in refusal]
    if scale:
        assert crashed and not limited
    else:
        assert limited and not crashed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_five_hundred_hostile_shapes_are_served_or_refused(
    backend: str, scale: tuple[int, ...]
) -> None:
    lines = outcomes(backend, 7, 500, *scale)
    assert sum(line["refusal"] is None for line in lines) > 100
    assert sum(line["tokens"] == 40 for line in lines) > 20
