"""`jackfield run-batch`: run the requests in a file, without a server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from ...core.config import EngineConfig
from ...core.errors import ConfigError, EngineStopped, JackfieldError
from ...core.registry import Plugins, load_plugins
from ..flags.engine_flags import add_engine_options, engine_config, fail
from ..flags.parser import Parser
from .log_level import add_log_level, start_logging


def make_parser() -> Parser:
    parser = Parser(
        prog="jackfield run-batch",
        description="Answer a file of requests in OpenAI's batch format, through the server's own "
        "routes but without a server. A run that was killed goes on where it was when it is "
        "started again.",
    )
    parser.add_argument("--model", default="", help="checkpoint; none: the embedded one")
    batch = parser.add_argument_group("batch")
    batch.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="requests, one a line (JSON)"
    )
    batch.add_argument(
        "-o", "--output-file", required=True, metavar="FILE",
        help="results, one a line; what it has already is not computed again",
    )  # fmt: skip
    batch.add_argument(
        "--overwrite",
        action="store_true",
        help="start from the beginning, and replace the output file",
    )
    batch.add_argument(
        "--max-concurrency", type=int, metavar="N",
        help="most requests running at once; default: twice max_num_seqs",
    )  # fmt: skip
    batch.add_argument("--max-body-bytes", type=int, default=32 << 20, help="refuse longer lines")
    batch.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")
    add_log_level(batch)
    add_engine_options(parser)
    parser.common = (
        "--model", "--input-file", "--output-file", "--max-concurrency", "--max-model-len",
        "--tensor-parallel-size",
    )  # fmt: skip
    return parser


def run(argv: list[str]) -> int:
    """Return 0 if every line has a result, failed requests included."""
    args = make_parser().parse_args(argv)
    start_logging(args)
    try:
        _check(args)
        config = engine_config(args, args.model)
        return asyncio.run(_run(args, config, load_plugins(disable=config.disable_plugins)))
    except KeyboardInterrupt:
        print("jackfield: interrupted; run the same command again to go on", file=sys.stderr)
        return 1
    except (JackfieldError, OSError) as error:
        return fail(error)


def _check(args: argparse.Namespace) -> None:
    """Check what is possible before a model is loaded. Raises ConfigError."""
    for flag, name in (("--input-file", args.input_file), ("--output-file", args.output_file)):
        if "://" in name:
            raise ConfigError(f"{flag}: {name!r} is a URL; only local files are read and written")
    if not Path(args.input_file).is_file():
        raise ConfigError(f"--input-file: there is no file {args.input_file!r}")
    output = Path(args.output_file)
    if output.exists() and output.samefile(args.input_file):
        raise ConfigError("--output-file: must not be the input file")
    for flag, value in (
        ("--max-concurrency", args.max_concurrency),
        ("--max-body-bytes", args.max_body_bytes),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{flag}: must be at least 1, got {value}")


async def _run(args: argparse.Namespace, config: EngineConfig, plugins: Plugins) -> int:
    from aiohttp import web
    from tqdm import tqdm

    from ...core.engine.async_engine import AsyncEngine
    from ...core.worker.serving_process import prepare_to_serve
    from ..batch.inprocess import LINES
    from ..batch.jsonl import LineReader, Result
    from ..batch.results import ResultsFile
    from ..batch.runner import BatchRunner
    from ..http.options import ServerOptions
    from ..server.app import make_app

    source, output = Path(args.input_file), Path(args.output_file)
    results = await asyncio.to_thread(ResultsFile, output, anew=args.overwrite, mode=0o666)
    failed, start, before = 0, time.monotonic(), len(results.done)
    try:
        ids = await asyncio.to_thread(LineReader(source, (), args.max_body_bytes).ids)
        _check_results(results, ids)
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(AsyncEngine(config, plugins=plugins))
            prepare_to_serve()
            app = make_app(engine, ServerOptions(max_body_bytes=args.max_body_bytes))
            server = web.AppRunner(app)
            stack.push_async_callback(server.cleanup)
            await server.setup()
            limit = args.max_concurrency or 2 * engine.config.max_num_seqs
            runner = BatchRunner(app, asyncio.Semaphore(limit))
            reader = LineReader(source, tuple(LINES), args.max_body_bytes)
            bar = stack.enter_context(
                tqdm(
                    total=len(ids), initial=before, unit="req", desc="Running batch",
                    disable=args.disable_tqdm,
                )
            )  # fmt: skip

            async def deliver(result: Result) -> None:
                nonlocal failed
                await asyncio.to_thread(results.append, result)
                failed += not result.ok
                bar.update()

            await runner.run((line for line in reader if line.id not in results.done), deliver)
        await asyncio.to_thread(results.put_in_order)
    except EngineStopped as error:
        print(
            f"jackfield: {error}; run the same command again to go on from "
            f"{len(results.done)} results",
            file=sys.stderr,
        )
        return 1
    finally:
        results.close()
    _say(len(ids), before, failed, time.monotonic() - start, output)
    return 0


def _check_results(results: Any, ids: list[str]) -> None:
    foreign = results.done.keys() - set(ids)
    if foreign:
        line = min(results.done[name] for name in foreign)
        raise ConfigError(
            f"--output-file: {results.path} has a result for line {line} that is not of this "
            "input; give another file, or --overwrite"
        )


def _say(total: int, before: int, failed: int, seconds: float, output: Path) -> None:
    was = f", {before} of them found there already" if before else ""
    print(f"{total} results in {output}{was}; {failed} failed now; {seconds:.1f} s")
