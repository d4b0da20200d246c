"""Compiles hostile shapes as an engine does, in a process that may not survive them.

python try_shapes.py BACKEND SEED COUNT [SCALE]: prints a JSON line for each shape, once it is
served or refused. With a scale, shapes are so much larger, and size and depth have no limits.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

import numpy as np
from hostile_shapes import shapes

import jackfield
from jackfield import StructuredOutputsParams
from jackfield.core.config import StructuredOutputsConfig
from jackfield.core.errors import InvalidRequest
from jackfield.core.grammars.spec import grammar_spec
from jackfield.core.grammars.store import GrammarStore
from jackfield.core.grammars.vocabulary import make_vocabulary
from jackfield.core.protocols.grammars import Grammar, Vocabulary
from jackfield.core.registry import load_plugins
from jackfield.core.text.tokenizer import Tokenizer

MODEL = Path(jackfield.__file__).parent / "plugins/models/embedded"
TOKENS = 40


def vocabulary() -> Vocabulary:
    tokenizer = Tokenizer.load(str(MODEL))
    assert tokenizer.eos_token_id is not None
    return make_vocabulary(tokenizer, 1536, [tokenizer.eos_token_id], compact_json=False)


def walk(grammar: Grammar, size: int, draw: random.Random) -> int:
    """As many tokens as an output may have here. → how many it had."""
    matcher, row = grammar.matcher(), np.empty(size // 32, dtype=np.int32)
    for count in range(TOKENS):
        try:
            matcher.fill_bitmask(row)
            tokens = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            if not tokens.size or not matcher.accept([int(draw.choice(tokens))]):
                return count
        except RuntimeError:
            return count
        if matcher.is_terminated():
            return count
    return TOKENS


async def main(backend: str, seed: int, count: int, scale: int = 0) -> None:
    limits = ("max_grammar_bytes", "max_grammar_depth", "max_grammar_references")
    config = StructuredOutputsConfig(
        backend=backend,
        compile_timeout=6.0,
        compile_memory=1.0,
        **dict.fromkeys(limits if scale else (), 10**9),  # type: ignore[arg-type]
    )
    store = GrammarStore(load_plugins()["structured_backend"], config, vocabulary)
    for name, value in shapes(seed, count, scale or 1):
        refusal, tokens = None, 0
        try:
            grammar = await store.compile(grammar_spec(StructuredOutputsParams(**value), config))
            tokens = walk(grammar, 1536, random.Random(name))
        except (InvalidRequest, ValueError) as error:
            refusal = str(error)[:300]
        print(json.dumps({"shape": name, "refusal": refusal, "tokens": tokens}), flush=True)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
