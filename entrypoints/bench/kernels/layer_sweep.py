"""What programs share that time a model's layer of one token in several ways, by rules of a kernel
that they change."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TypeVar

from ..report import Emitter, Record, environment, say, table
from ..roofline import measure_ceilings
from .token_layer import CONTEXT, MAX_MODEL_LEN, TokenLayer
from .tune import layer_of

Way = TypeVar("Way")


@contextlib.contextmanager
def changed_rules(module: ModuleType, **rules: int) -> Iterator[None]:
    """Change a kernel's constants; recorded launches keep what they had."""
    before = {name: getattr(module, name) for name in rules}
    try:
        for name, value in rules.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def sweep_parser(doc: str | None, models: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of such a program. doc: its docstring; models: by default."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(models))
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument(
        "--max-model-len", type=int, default=MAX_MODEL_LEN, help="decides the splits"
    )
    parser.add_argument("--output", help="a file of JSON lines, or - for standard output")
    return parser


def sweep(
    parser: argparse.ArgumentParser,
    workload: str,
    ways: Sequence[Way],
    facts: Callable[[Way], Record],
    seconds: Callable[[TokenLayer, Way], float],
    prepare: Callable[[argparse.Namespace], None] = lambda args: None,
) -> int:
    """Time each model's layer each way; return the exit status, 2 without a CUDA device.

    facts: of a way, for its record; seconds: the time of one layer; prepare: is called before the
    first model.
    """
    import torch

    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"{parser.prog}: there is no CUDA device here to measure", file=sys.stderr)
        return 2
    emitter = Emitter(args.output, environment("cuda"))
    rate = measure_ceilings("cuda", "bfloat16").copy_bytes_per_second
    prepare(args)
    for model in args.models:
        say(f"measuring {model}")
        shape = layer_of(model)
        layer = TokenLayer(shape, context=args.context, max_model_len=args.max_model_len)
        for way in ways:
            took = seconds(layer, way)
            at = {"context": args.context, "max_model_len": args.max_model_len, **facts(way)}
            emitter.emit({
                "workload": workload, "model": model, "at": at,
                "measured": {
                    "layer_us": round(1e6 * took, 2),
                    "share_of_floor": round(shape.num_bytes / rate / took, 3),
                },
            })  # fmt: skip
    rows = [
        [line["model"], *line["at"].values(), *line["measured"].values()]
        for line in emitter.records
    ]
    first = emitter.records[0]
    print(table(rows, ["model", *first["at"], *first["measured"]]))
    return 0
