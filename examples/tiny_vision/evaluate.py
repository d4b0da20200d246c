"""Says how often a checkpoint of `train.py` answers right, through the engine.

    python evaluate.py [DIR]      (without DIR: the model that ships with Jackfield)

Pictures are drawn from another seed than those it was trained with. A blank picture shows what
guessing is worth.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections import Counter
from typing import Any

from pictures import CANVAS, Example, examples
from PIL import Image

from jackfield import AsyncEngine, EngineConfig, SamplingParams

SEED, COUNT = 2, 1000


async def right(engine: AsyncEngine, example: Example, picture: Image.Image) -> bool:
    """Whether the answer about a picture is the example's."""
    content = [
        {"type": "image", "image": picture},
        {"type": "text", "text": f"{example.question} ?"},
    ]
    params = SamplingParams(temperature=0.0, max_tokens=16)
    async for output in engine.chat([{"role": "user", "content": content}], params):
        text = output.outputs[0].text
    return text.strip(" .") == example.answer


async def scores(model: str, count: int = COUNT) -> dict[str, Any]:
    """Kind of question → share of right answers; and with blank pictures."""
    asked, hits = Counter[str](), Counter[str]()
    async with AsyncEngine(EngineConfig(model=model)) as engine:
        drawn = [*itertools.islice(examples(SEED), count)]
        results = await asyncio.gather(*(right(engine, each, each.picture) for each in drawn))
        for example, good in zip(drawn, results, strict=True):
            asked[example.kind] += 1
            hits[example.kind] += good
        blank = Image.new("RGB", (CANVAS, CANVAS), (235, 235, 235))
        guesses = await asyncio.gather(*(right(engine, each, blank) for each in drawn))
    shares: dict[str, Any] = {kind: round(hits[kind] / asked[kind], 3) for kind in sorted(asked)}
    return {**shares, "guessed": round(sum(guesses) / count, 3)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(scores(sys.argv[1] if sys.argv[1:] else "tiny-vision"))))
