"""Adapters that run a list of requests in this process, one for each engine that can be compared.

Other engines are imported only when chosen. Each takes token ids, ignores EOS and detokenizes
nothing.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ....core.config import EngineConfig
from ..workloads import Ask

SWITCH_INTERVAL = 0.00005
"""Same value as in the server."""


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

    def run(self, asks: Sequence[Ask]) -> Outcome:
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
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._loop = event_loop()
        self._engine = AsyncEngine(config)
        self._loop.run_until_complete(self._engine.start())
        info = self._engine.info
        self.details = {
            "attention": info.attention_backend,
            "dtype": info.dtype,
            "kv_blocks": info.num_blocks,
        }
        gc.collect()
        gc.freeze()

    def run(self, asks: Sequence[Ask]) -> Outcome:
        from ....core.sampling_params import OutputKind, SamplingParams

        async def one(ask: Ask) -> Any:
            params = SamplingParams(
                max_tokens=ask.output,
                temperature=ask.temperature,
                ignore_eos=True,
                detokenize=False,
                output_kind=OutputKind.FINAL_ONLY,
            )
            return await anext(self._engine.generate(ask.prompt, params))

        async def everything() -> tuple[float, list[Any]]:
            began = time.perf_counter()
            outputs = await asyncio.gather(*(one(ask) for ask in asks))
            return time.perf_counter() - began, outputs

        seconds, outputs = self._loop.run_until_complete(everything())
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        tokens = [output.outputs[0].token_ids for output in outputs]
        _check(asks, tokens)
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
        given: dict[str, Any] = {
            "model": model, "skip_tokenizer_init": True, "max_model_len": max_model_len,
            "gpu_memory_utilization": 0.9, **options,
        }  # fmt: skip
        if dummy:
            given |= {"load_format": "dummy", "dtype": "bfloat16"}
        self._vllm = vllm
        self._llm = vllm.LLM(**given)
        self.details: dict[str, Any] = {}

    def run(self, asks: Sequence[Ask]) -> Outcome:
        prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
        params = [
            self._vllm.SamplingParams(
                max_tokens=ask.output,
                temperature=ask.temperature,
                ignore_eos=True,
                detokenize=False,
            )
            for ask in asks
        ]
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        _check(asks, tokens)
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
        wanted = getattr(torch, dtype)
        if dummy:
            config = transformers.AutoConfig.from_pretrained(model)
            with self._device:
                made = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    config, dtype=wanted
                )
        else:
            made = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=wanted)
        self._model = made.to(self._device).eval()
        self.details = {"attention": self._model.config._attn_implementation, "dtype": dtype}

    def run(self, asks: Sequence[Ask]) -> Outcome:
        tokens: list[list[int]] = [[] for _ in asks]
        order = sorted(range(len(asks)), key=lambda index: asks[index].output)
        began = time.perf_counter()
        for first in range(0, len(order), self.BATCH):
            chosen = order[first : first + self.BATCH]
            rows = self._generate([asks[index] for index in chosen])
            for index, row in zip(chosen, rows, strict=True):
                tokens[index] = row[: asks[index].output]
        seconds = time.perf_counter() - began
        _check(asks, tokens)
        return Outcome(seconds, tokens, 0)

    def _generate(self, asks: list[Ask]) -> list[list[int]]:
        torch = self._torch
        width, longest = max(len(a.prompt) for a in asks), max(a.output for a in asks)
        ids = torch.zeros(len(asks), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, ask in enumerate(asks):
            ids[row, width - len(ask.prompt) :] = torch.tensor(ask.prompt)
            mask[row, width - len(ask.prompt) :] = 1
        sampling: dict[str, Any] = {"do_sample": False}
        if asks[0].temperature > 0:
            sampling = {"do_sample": True, "temperature": asks[0].temperature, "top_k": 0}
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


def _check(asks: Sequence[Ask], tokens: Sequence[Sequence[int]]) -> None:
    """Raise if a request has fewer tokens than it should, because its throughput would not
    count."""
    wanted, got = [ask.output for ask in asks], [len(row) for row in tokens]
    if wanted != got:
        raise RuntimeError(f"{sum(got)} tokens came instead of {sum(wanted)}")


def event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's loop factory if uvloop is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
