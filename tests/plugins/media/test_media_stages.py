"""Pictures with the layers in two stages: each encodes, the first places, later layers add."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forked
import pytest
from rank_executor import Plugin as Ranks
from seeing_models import save
from test_media_families import CASES, Made, check, engine_of, run

from jackfield.core.registry import load_plugins
from jackfield.core.remote import processes

THREADS = {"executor": "rank_threads"}


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("Qwen3VLForConditionalGeneration", THREADS),
        pytest.param("Gemma3ForConditionalGeneration", THREADS, marks=pytest.mark.slow),
        # Each imports what pictures need.
        pytest.param("Qwen3VLForConditionalGeneration", {}, marks=pytest.mark.slow),
    ],
    ids=["Qwen3VL", "Gemma3", "processes"],
)
async def test_two_stages_say_what_transformers_says(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The second of the decoder layers that get rows of their own is on the second stage; and the
    tokens of a picture see each other on both."""
    made = Made(tmp_path, save(architecture, tmp_path), "image")
    stages = {"pipeline_parallel_size": 2, "pipeline_layer_partition": [1, 2], **options}
    plugins = load_plugins(extra=[Ranks()])
    with forked.processes_of(processes):
        async with engine_of(made, plugins, **stages) as engine:
            for name in ("two", "one", "other words", "none"):
                check(made, CASES[name], await run(engine, made, CASES[name]))
