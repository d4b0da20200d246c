"""The embedded model of pictures and what it was made from."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jackfield
from jackfield.core.loading.checkpoint_folder import checkpoint_folder

pytest.importorskip("PIL")
EXAMPLE = Path(jackfield.__file__).resolve().parent / "examples" / "tiny_vision"


@pytest.fixture(scope="module")
def made() -> Iterator[Any]:
    """The example's modules, which import each other by plain names."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        others = sys.modules.pop("evaluate", None)
        import evaluate
        import pictures

        yield pictures, evaluate
    finally:
        sys.path.remove(str(EXAMPLE))
        del sys.modules["evaluate"]
        if others is not None:
            sys.modules["evaluate"] = others


def test_pictures_are_the_same_for_a_seed(made: Any) -> None:
    pictures, _ = made

    def some(seed: int) -> list[Any]:
        return [
            (each.picture.tobytes(), each.figure, each.question)
            for each in itertools.islice(pictures.examples(seed), 50)
        ]

    assert some(5) == some(5) != some(6)
    assert {each.kind for each in itertools.islice(pictures.examples(5), 100)} == {
        *pictures.QUESTIONS
    }


def test_the_model_is_small() -> None:
    folder = checkpoint_folder("tiny-vision")
    assert sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) <= 2_000_000


async def test_it_sees_what_is_drawn(made: Any) -> None:
    """And nothing in a blank picture; the recorded scores are at least 95 % for each kind."""
    pictures, evaluate = made
    recorded = json.loads((EXAMPLE / "scores.json").read_text())
    guessed = recorded.pop("guessed")
    assert recorded.keys() == pictures.QUESTIONS.keys()
    assert min(recorded.values()) >= 0.95 and guessed < 0.4
    scores = await evaluate.scores("tiny-vision", 60)
    assert scores.pop("guessed") < 0.4
    assert min(scores.values()) >= 0.8
