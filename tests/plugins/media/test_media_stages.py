"""Pictures with the layers in two processes: each encodes, the first places, later layers add."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
from seeing_models import save
from test_media_families import CASES, Made, check, engine_of, run

from jackfield.core.remote import processes


@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen3VLForConditionalGeneration",
        pytest.param("Gemma3ForConditionalGeneration", marks=pytest.mark.slow),
    ],
)
async def test_two_stages_say_what_transformers_says(architecture: str, tmp_path: Path) -> None:
    """The second of the decoder layers that get rows of their own is on the second stage; and the
    tokens of a picture see each other on both."""
    made = Made(tmp_path, save(architecture, tmp_path), "image")
    options = {"pipeline_parallel_size": 2, "pipeline_layer_partition": [1, 2]}
    with forked.processes_of(processes):
        async with engine_of(made, **options) as engine:
            for name in ("two", "one", "other words", "none"):
                check(made, CASES[name], await run(engine, made, CASES[name]))
