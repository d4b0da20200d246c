"""A sampler with its state, as the model runner keeps it, and what it should choose, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jackfield.core.sampling_params import SamplingParams
from jackfield.core.step import SlotStart
from jackfield.core.worker.sampling.sampler import Sampler
from jackfield.core.worker.sampling.sampling_state import SamplingState
from jackfield.core.worker.sampling.torch_sampler import SamplerOutput

MAX_LEN = 64
U32 = np.uint32


# ---------------------------------------------------------------- no waiting for the device


class WouldSynchronize(Exception):
    """An operation that makes the host wait for a device, or whose shape depends on data."""


class NoSync(TorchDispatchMode):
    """Fails on operations that would synchronise, whatever the device."""

    FORBIDDEN = (
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::masked_select",
        "aten::multinomial",
        "aten::unique",
        "aten::_unique",
        "aten::_unique2",
        "aten::repeat_interleave",
        "aten::equal",
        "aten::is_nonzero",
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name in self.FORBIDDEN:
            raise WouldSynchronize(name)
        if name.startswith("aten::index") and len(args) > 1 and isinstance(args[1], list | tuple):
            if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
                raise WouldSynchronize(f"{name} with a mask")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_sync(device: str) -> Iterator[None]:
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with NoSync():
        yield


# ---------------------------------------------------------------- the oracle


def splitmix(state: int) -> int:
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def murmur(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> U32(16))
    x = x * U32(0x85EBCA6B)
    x = x ^ (x >> U32(16))
    x = x * U32(0xC2B2AE35)
    return x ^ (x >> U32(16))


def oracle_gumbel(seed: int, position: int, vocab_size: int) -> np.ndarray:
    first = splitmix(seed % 2**64)
    lanes = np.array([first % 2**32, first >> 32, splitmix(first) % 2**32], dtype=U32)
    steps = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D], dtype=U32)
    keys = murmur(lanes + U32(position) * steps) | np.array([0, 1, 1], dtype=U32)
    x = murmur(np.arange(vocab_size, dtype=U32) + U32(0x9E3779B9)) * keys[1] + keys[0]
    x = (x ^ (x >> U32(16))) * keys[2]
    x = x ^ (x >> U32(16))
    v = np.abs(x.view(np.int32).astype(np.float64) + 0.5) * 2.0**-31 * (1 - 2.0**-23)
    return -np.log(-np.log1p(-v))


def oracle_processed(logits: np.ndarray, start: SlotStart, tokens: list[int]) -> np.ndarray:
    """Everything up to the temperature. logits: [V] float64; tokens: prompt and output so far."""
    params, out = start.params, tokens[start.num_prompt_tokens :]
    x = logits.copy()
    if params.allowed_token_ids is not None:
        banned = np.ones(len(x), dtype=bool)
        banned[[t for t in params.allowed_token_ids if t < len(x)]] = False
        x[banned] = -np.inf
    for word in start.bad_words_token_ids:
        *prefix, last = word
        if last < len(x) and len(prefix) <= len(out) and out[len(out) - len(prefix) :] == prefix:
            x[last] = -np.inf
    if len(out) < params.min_tokens:
        for token in start.stop_token_ids:
            if token < len(x):
                x[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        if token < len(x):
            x[token] += bias
    for token in set(tokens):
        x[token] *= params.repetition_penalty ** (-1 if x[token] > 0 else 1)
    for token in set(out):
        x[token] -= params.frequency_penalty * out.count(token) + params.presence_penalty
    return x


def oracle_filter(x: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, bool]:
    """Which tokens stay, of logits over temperature; and whether rounding could change that."""
    order = np.lexsort((np.arange(len(x)), -x))
    close = False
    keep = x > -np.inf
    if params.min_p > 0:
        least = x.max() + math.log(params.min_p)
        close |= bool((np.abs(x[keep] - least) < 1e-4).any()) and params.min_p < 1
        keep &= x >= least
    if params.top_k > 0:
        keep[order[params.top_k :]] = False
    if params.top_p < 1:
        probs = np.where(keep, np.exp(x - x.max()), 0.0)
        reached = np.cumsum((probs / probs.sum())[order])
        close |= bool((np.abs(reached - params.top_p) < 1e-5).any())
        count = int((reached < params.top_p - 1e-12).sum()) + 1
        keep[order[count:]] = False
    return keep, close


def oracle_token(logits: np.ndarray, start: SlotStart, tokens: list[int]) -> tuple[int, bool]:
    """The token, and whether rounding could change it."""
    x = oracle_processed(logits, start, tokens)
    if start.params.greedy:
        top = np.sort(x)[::-1]
        return int(x.argmax()), bool(0 < top[0] - top[1] < 1e-4)
    x = x / start.params.temperature
    keep, close = oracle_filter(x, start.params)
    x = np.where(keep, x + oracle_gumbel(start.seed, len(tokens), len(x)), -np.inf)
    top = np.sort(x)[::-1]
    return int(x.argmax()), close or bool(top[0] - top[1] < 1e-3)


# ---------------------------------------------------------------- a worker around the sampler


class Bench:
    """A state, a sampler and the token history, as the model runner keeps it."""

    def __init__(self, vocab_size: int, *, slots: int = 16, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        self.history = torch.zeros((slots, MAX_LEN), dtype=torch.int32, device=device)
        self.state = SamplingState(slots, vocab_size, self.device, self.history)
        self.sampler = Sampler(self.state)
        self.starts: dict[int, SlotStart] = {}
        self.tokens: dict[int, list[int]] = {}

    def start(
        self,
        slot: int,
        params: SamplingParams,
        prompt: list[int],
        *,
        output: list[int] = [],  # noqa: B006
        seed: int | None = None,
        **more: Any,
    ) -> None:
        start = SlotStart(
            slot=slot,
            request_id=str(slot),
            token_ids=(*prompt, *output),
            num_prompt_tokens=len(prompt),
            num_computed_tokens=0,
            params=params,
            seed=slot if seed is None else seed,
            **more,
        )
        self.starts[slot], self.tokens[slot] = start, [*prompt, *output]
        self.history[slot, : len(start.token_ids)] = torch.tensor(
            start.token_ids, dtype=torch.int32, device=self.device
        )
        self.state.start(start)

    def step(self, rows: list[int], logits: torch.Tensor) -> SamplerOutput:
        """Sample for the slots in `rows`, without synchronising, and append the tokens."""
        logits = logits.to(self.device)
        slots = torch.tensor(rows, dtype=torch.int64).to(self.device)
        lengths = torch.tensor([len(self.tokens[s]) for s in rows]).to(self.device)
        with no_sync(self.device.type):
            self.state.upload()
            out = self.sampler.in_torch.sample(logits, slots, rows, lengths)
        for slot, token in zip(rows, out.token_ids.tolist(), strict=True):
            self.history[slot, len(self.tokens[slot])] = token
            self.tokens[slot].append(token)
        return out


def random_params(rng: np.random.Generator, vocab_size: int) -> dict[str, Any]:
    """A random mix: most things off most of the time."""

    def maybe(value: Any, default: Any, chance: float = 0.3) -> Any:
        return value if rng.random() < chance else default

    def ids(most: int) -> list[int]:
        return rng.choice(vocab_size + 3, size=rng.integers(1, most + 1), replace=False).tolist()

    params = SamplingParams(
        temperature=maybe(0.0, float(rng.uniform(0.2, 2.0))),
        top_k=maybe(int(rng.integers(1, vocab_size + 5)), 0),
        top_p=maybe(float(rng.uniform(0.02, 0.99)), 1.0),
        min_p=maybe(float(rng.uniform(0.0, 0.6)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        min_tokens=maybe(int(rng.integers(1, 5)), 0),
        logit_bias=maybe({t: float(rng.uniform(-9, 9)) for t in ids(5)}, None),
        allowed_token_ids=maybe((*ids(vocab_size // 2), 0), None, 0.2),
        logprobs=maybe(int(rng.integers(0, 6)), None),
    )
    words = [tuple(rng.integers(0, 4, size=rng.integers(1, 4)).tolist()) for _ in range(6)]
    return {
        "params": params,
        "stop_token_ids": tuple(maybe(ids(8), [])),
        "bad_words_token_ids": tuple(maybe(words, [])),
    }
