"""`jackfield bench kv-compression`: perplexity of real text, recall of passages, and similarity of
attention's outputs, for each KV compressor and share of tokens that stays, and for levels
(`--kv-compression-levels` of the server), on any checkpoint.

Each text's cache is compacted once, and what follows is scored from what is left. Perplexity is of
the text's own next tokens; recall is how many tokens of a passage of the context the model says
again, after its first ones; similarity is the cosine of each layer's attention output with that
from the whole cache, at the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import pydoc
from collections.abc import Sequence
from pathlib import Path

from ....core.cache.level_options import parse_levels
from ....core.errors import ConfigError, JackfieldError
from ....core.registry import load_plugins
from ...flags.parser import Parser
from ..report import Emitter, Record, add_output_options, environment, say, table
from .measure import CUE, WHOLE, Sizes, measure
from .plot import plot_quality

RATIOS = (0.75, 0.5, 0.25, 0.1)
MODULES = (
    "argparse", "asyncio", "collections", "datetime", "decimal", "doctest", "email", "enum",
    "functools", "heapq", "inspect", "json", "logging", "optparse", "pathlib", "pickle", "random",
    "re", "shutil", "socket", "statistics", "string", "subprocess", "tempfile", "threading",
    "traceback", "turtle", "typing", "unittest", "urllib.request", "xml.etree.ElementTree",
)  # fmt: skip
"""Modules of Python's library whose documentation is the text, unless one is given."""


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    options = Parser(
        prog="jackfield bench kv-compression", description=inspect.cleandoc(__doc__ or "")
    )
    options.add_argument(
        "--model", default="", help="a checkpoint folder or a hub name (default: the embedded one)"
    )
    options.add_argument(
        "--policies", nargs="+", metavar="NAME", help="KV compressors (default: all registered)"
    )
    options.add_argument(
        "--ratios", nargs="+", type=float, default=list(RATIOS), metavar="SHARE",
        help=f"shares of the tokens that stay (default: {' '.join(map(str, RATIOS))})",
    )  # fmt: skip
    options.add_argument(
        "--levels", nargs="+", default=[], metavar="[NAME=]LEVELS",
        help="levels besides, as 8@32 or key_norm=8@32,4:0.5@128, of a KV compressor if it chooses",
    )  # fmt: skip
    options.add_argument(
        "--text", type=Path, metavar="FILE",
        help="a text in UTF-8 (default: documentation of Python's library)",
    )  # fmt: skip
    options.add_argument(
        "--context", type=int, default=512, metavar="TOKENS",
        help="tokens before the compaction (default: 512)",
    )  # fmt: skip
    options.add_argument(
        "--scored", type=int, default=128, metavar="TOKENS",
        help="tokens after it, fewer than before (default: 128)",
    )  # fmt: skip
    options.add_argument(
        "--samples", type=int, default=8, metavar="N", help="parts of the text (default: 8)"
    )
    options.add_argument("--device", default="auto", help="as of the server (default: auto)")
    options.add_argument("--dtype", default="auto", help="as of the server (default: auto)")
    options.add_argument(
        "--kv-cache-dtype", default="auto", metavar="TYPE", help="as of the server (default: auto)"
    )
    options.add_argument(
        "--plot", type=Path, metavar="FOLDER", help="write a picture there (needs matplotlib)"
    )
    add_output_options(options)
    return options


def run(argv: Sequence[str]) -> int:
    """Return the exit status."""
    options = parser().parse_args(argv)
    try:
        check(options)
        text = library_text() if options.text is None else options.text.read_text("utf-8")
        records = asyncio.run(results(options, text))
    except (JackfieldError, OSError, UnicodeDecodeError) as error:
        say(f"jackfield bench kv-compression: {error}")
        return 2
    say(summary(records))
    if options.plot is not None:
        say(f"wrote {plot_quality(records, options.plot, options.model or 'embedded')}")
    return 0


def check(options: argparse.Namespace) -> None:
    """Raises ConfigError, with the flag's name."""
    for ratio in options.ratios:
        if not 0.0 < ratio <= 1.0:
            raise ConfigError(f"--ratios: {ratio} is not in (0, 1]", param="ratios")
    if options.samples < 1:
        raise ConfigError("--samples: must be at least 1", param="samples")
    if options.context < 8 * CUE:
        raise ConfigError(f"--context: must be at least {8 * CUE}", param="context")
    for each in options.levels:
        try:
            parse_levels(each.rpartition("=")[2])
        except ValueError as error:
            raise ConfigError(f"--levels: {error}", param="levels") from None
    if not 1 <= options.scored < options.context:
        raise ConfigError(
            f"--scored: {options.scored} is not between 1 and --context ({options.context}), where "
            "the cache would be compacted again",
            param="scored",
        )


async def results(options: argparse.Namespace, text: str) -> list[Record]:
    """Measure all policies, the whole cache first, and write each result as it comes."""
    sizes = Sizes(options.context, options.scored, options.samples)
    length = options.context + max(options.scored, options.context // 2) + 1
    engine = {
        "model": options.model, "device": options.device, "dtype": options.dtype,
        "kv_cache_dtype": options.kv_cache_dtype, "max_num_batched_tokens": 2 * length,
    }  # fmt: skip
    names = options.policies or sorted(load_plugins()["kv_compressor"])
    emitter = Emitter(options.output, environment(options.device))
    for policy in (WHOLE, *names, *options.levels):
        ratios = options.ratios if policy in names else [1.0]
        async for result in measure(engine, policy, ratios, text, sizes):
            emitter.emit({
                **result, "model": options.model or "embedded", "context": options.context,
                "scored": options.scored, "samples": options.samples,
                "kv_cache_dtype": options.kv_cache_dtype,
            })  # fmt: skip
    return emitter.records


def library_text() -> str:
    """Return documentation of Python's library: real text that is everywhere."""
    plain = pydoc.plaintext  # type: ignore[attr-defined]
    return "\n\n".join(pydoc.render_doc(name, renderer=plain) for name in MODULES)


def summary(records: Sequence[Record]) -> str:
    """Return a row per policy and ratio."""
    rows = [
        (
            each["policy"], each["ratio"], f"{100 * each['bytes']:.0f} %",
            f"{each['perplexity']:.3f}",
            f"{100 * each['recall']:.0f} %", f"{each['cosine_mean']:.3f}",
            f"{each['cosine_least']:.3f}",
        )
        for each in records
    ]  # fmt: skip
    return table(
        rows, ["policy", "kept", "bytes", "perplexity", "recall", "cosine, mean", "least layer"]
    )
