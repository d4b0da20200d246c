"""Adapters that run a list of requests in this process, one for each engine that can be compared.

Other engines are imported only when chosen. Each takes token ids, ignores EOS and detokenizes
nothing.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ....core.config import EngineConfig
from ....core.worker.serving_process import prepare_to_serve
from ..workloads import BenchRequest


class Outcome(NamedTuple):
    """Outcome of a list of requests."""

    seconds: float
    token_ids: list[list[int]]
    """Generated token ids, per request."""
    cached_tokens: int
    """Number of prompt tokens found in a prefix cache."""


class Backend(Protocol):
    """A started engine."""

    version: str
    details: dict[str, Any]
    """Facts about the engine: device, attention backend, KV blocks."""

    def run(self, requests: Sequence[BenchRequest]) -> Outcome:
        """Run all requests at once, to their end."""

    def forget(self) -> None:
        """Clear the prefix cache."""

    def close(self) -> None:
        """Free the device."""


class JackfieldBackend:
    """`AsyncEngine` on an event loop of this thread, as the server runs it."""

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
        _check(requests, tokens)
        return Outcome(seconds, tokens, sum(output.num_cached_tokens for output in outputs))

    def forget(self) -> None:
        self._loop.run_until_complete(self._engine.reset_prefix_cache())

    def close(self) -> None:
        self._loop.run_until_complete(self._engine.stop())
        self._loop.close()


class VLLMBackend:
    """vLLM's Python API, with its defaults."""

    def __init__(self, model: str, *, max_model_len: int, dummy: bool, options: dict[str, Any]):
        import vllm

        self.version = vllm.__version__
        arguments: dict[str, Any] = {
            "model": model, "skip_tokenizer_init": True, "max_model_len": max_model_len,
            "gpu_memory_utilization": 0.9, **options,
        }  # fmt: skip
        if dummy:
            arguments |= {"load_format": "dummy", "dtype": "bfloat16"}
        self._vllm = vllm
        self._llm = vllm.LLM(**arguments)
        self.details: dict[str, Any] = {}

    def run(self, requests: Sequence[BenchRequest]) -> Outcome:
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        params = [
            self._vllm.SamplingParams(
                max_tokens=request.output,
                temperature=request.temperature,
                ignore_eos=True,
                detokenize=False,
            )
            for request in requests
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        _check(requests, tokens)
        cached = sum(getattr(output, "num_cached_tokens", None) or 0 for output in outputs)
        return Outcome(seconds, tokens, cached)

    def forget(self) -> None:
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        del self._llm
        gc.collect()


class TransformersBackend:
    """`transformers`' own `generate`, in static batches of similar output lengths.

    A batch generates as many tokens as its longest request; tokens beyond a request's own length
    are dropped and not counted, but their time is.
    """

    BATCH = 32

    def __init__(self, model: str, *, dummy: bool, device: str, dtype: str) -> None:
        import torch
        import transformers

        self.version = importlib.metadata.version("transformers")
        self._torch = torch
        self._device = torch.device(device)
        torch_dtype = getattr(torch, dtype)
        if dummy:
            config = transformers.AutoConfig.from_pretrained(model)
            with self._device:
                loaded_model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    config, dtype=torch_dtype
                )
        else:
            loaded_model = transformers.AutoModelForCausalLM.from_pretrained(
                model, dtype=torch_dtype
            )
        self._model = loaded_model.to(self._device).eval()
        self.details = {"attention": self._model.config._attn_implementation, "dtype": dtype}

    def run(self, requests: Sequence[BenchRequest]) -> Outcome:
        tokens: list[list[int]] = [[] for _ in requests]
        order = sorted(range(len(requests)), key=lambda index: requests[index].output)
        start = time.perf_counter()
        for first in range(0, len(order), self.BATCH):
            indices = order[first : first + self.BATCH]
            rows = self._generate([requests[index] for index in indices])
            for index, row in zip(indices, rows, strict=True):
                tokens[index] = row[: requests[index].output]
        seconds = time.perf_counter() - start
        _check(requests, tokens)
        return Outcome(seconds, tokens, 0)

    def _generate(self, requests: list[BenchRequest]) -> list[list[int]]:
        torch = self._torch
        width, longest = max(len(a.prompt) for a in requests), max(a.output for a in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        sampling: dict[str, Any] = {"do_sample": False}
        if requests[0].temperature > 0:
            sampling = {"do_sample": True, "temperature": requests[0].temperature, "top_k": 0}
        out = self._model.generate(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            max_new_tokens=longest,
            min_new_tokens=longest,
            eos_token_id=None,
            pad_token_id=0,
            **sampling,
        )
        rows: list[list[int]] = out[:, width:].tolist()
        return rows

    def forget(self) -> None:
        """Do nothing: no cache outlives a call."""

    def close(self) -> None:
        del self._model
        gc.collect()


def _check(requests: Sequence[BenchRequest], tokens: Sequence[Sequence[int]]) -> None:
    """Raise if a request has fewer tokens than it should, because its throughput would not
    count."""
    expected, lengths = [request.output for request in requests], [len(row) for row in tokens]
    if expected != lengths:
        raise RuntimeError(f"{sum(lengths)} tokens came instead of {sum(expected)}")


def event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's loop factory if uvloop is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
