"""Runs a list of requests in this process: token ids in and out, EOS ignored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from ....core.config import EngineConfig
from ....core.worker.serving_process import prepare_to_serve
from ..types import Outcome
from ..workloads import BenchRequest


class JackfieldBackend:
    def __init__(self, config: EngineConfig) -> None:
        from .... import __version__
        from ....core.engine.async_engine import AsyncEngine

        self.version = __version__
        self._loop = event_loop()
        self._engine = AsyncEngine(config)
        self._loop.run_until_complete(self._engine.start())
        info = self._engine.info
        self.details = {
            "attention": info.attention_backend,
            "dtype": info.dtype,
            "kv_blocks": info.num_blocks,
        }
        prepare_to_serve()

    def run(self, requests: Sequence[BenchRequest]) -> Outcome:
        from ....core.sampling_params import OutputKind, SamplingParams

        async def finish_one(request: BenchRequest) -> Any:
            params = SamplingParams(
                max_tokens=request.output,
                temperature=request.temperature,
                ignore_eos=True,
                detokenize=False,
                output_kind=OutputKind.FINAL_ONLY,
            )
            return await anext(self._engine.generate(request.prompt, params))

        async def everything() -> tuple[float, list[Any]]:
            start = time.perf_counter()
            outputs = await asyncio.gather(*(finish_one(request) for request in requests))
            return time.perf_counter() - start, outputs

        seconds, outputs = self._loop.run_until_complete(everything())
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        tokens = [output.outputs[0].token_ids for output in outputs]
        check_lengths(requests, tokens)
        return Outcome(seconds, tokens, sum(output.num_cached_tokens for output in outputs))

    def forget(self) -> None:
        self._loop.run_until_complete(self._engine.reset_prefix_cache())

    def close(self) -> None:
        self._loop.run_until_complete(self._engine.stop())
        self._loop.close()


def check_lengths(requests: Sequence[BenchRequest], tokens: Sequence[Sequence[int]]) -> None:
    """Raise if a request has too few tokens, which would distort the throughput."""
    expected, lengths = [request.output for request in requests], [len(row) for row in tokens]
    if expected != lengths:
        raise RuntimeError(f"{sum(lengths)} tokens came instead of {sum(expected)}")


def event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's loop, if installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
