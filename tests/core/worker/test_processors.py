"""Plugged-in logits processors: at their place in the order, in any company, and failing alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, InvalidRequest, JackfieldError
from jackfield.core.hooks import hookimpl
from jackfield.core.protocols.logits_processors import (
    LogitsProcessor,
    LogitsProcessorSetup,
    ProcessedRows,
)
from jackfield.core.registry import Provenance, load_plugins
from jackfield.core.step import SlotStart
from jackfield.core.worker.sampling.processors import Processors
from jackfield.core.worker.sampling.sampler import Sampler

from helpers import make_checkpoint
from sampling_bench import Bench


def resized_in_place(logits: torch.Tensor) -> torch.Tensor:
    return logits.resize_(logits.shape[0] + 1, logits.shape[1])


def resized_aside(logits: torch.Tensor) -> torch.Tensor:
    first = logits.clone()
    logits.resize_(0)
    return first[:, :-1]


WRONG: dict[str, Any] = {
    "resized": resized_in_place,
    "resized aside": resized_aside,
    "one row": lambda logits: logits[:1].repeat(1, 2),
    "nothing": lambda logits: None,
    "sparse": lambda logits: logits.to_sparse(),
    "meta": lambda logits: logits.to("meta"),
}
"""What `apply` may not give."""


class Only(LogitsProcessor):
    """Leaves the token `only`; "raise" fails when it is applied, "refuse" when it starts."""

    parameters = frozenset({"only"})
    examples = ({"only": 3},)
    shown: list[tuple[int, ...]] = []
    changes = 0
    ended = 0

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        assert params.extra_args is not None
        if params.extra_args["only"] == "bad":
            raise InvalidRequest("only: must be a token id", param="only")
        if params.extra_args["only"] == "bug":
            raise KeyError("oh")

    def __init__(self, setup: LogitsProcessorSetup) -> None:
        self.tokens: dict[int, Any] = {}

    def start(self, slot: int, request: SlotStart) -> bool:
        token = (request.params.extra_args or {}).get("only")
        if token == "refuse":
            raise ValueError("not today")
        self.tokens[slot] = token
        return token is not None

    def end(self, slot: int) -> None:
        type(self).ended += 1

    def batch_changed(self, slots: tuple[int, ...]) -> None:
        type(self).changes += 1

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        self.shown.append(rows.slots)
        expected = [self.tokens[slot] for slot in rows.slots]
        if "raise" in expected:
            raise RuntimeError("boom")
        for name in expected:
            if name in WRONG:
                return WRONG[name](logits)
        mask = torch.zeros_like(logits, dtype=torch.bool)
        mask[range(len(expected)), expected] = True
        return logits.masked_fill(~mask, -torch.inf)


class Bow(LogitsProcessor):
    """Adds `bow` to all tokens, up to the largest: behind the temperature, on rows that draw."""

    parameters = frozenset({"bow"})
    examples = ({"bow": 2.0},)
    argmax_invariant = True
    shown: list[tuple[int, ...]] = []

    def __init__(self, setup: LogitsProcessorSetup) -> None:
        self.amounts = torch.zeros(setup.num_slots, device=setup.device)

    def start(self, slot: int, request: SlotStart) -> bool:
        amount = (request.params.extra_args or {}).get("bow")
        self.amounts[slot] = amount or 0.0
        return amount is not None

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        self.shown.append(rows.slots)
        amounts = self.amounts[rows.device_slots].unsqueeze(1)
        return torch.minimum(logits + amounts, logits.amax(dim=1, keepdim=True))


class Plugin:
    @hookimpl
    def register_logits_processors(self, registry: Any) -> None:
        registry.add("only", Only)
        registry.add("bow", Bow)


def plugins() -> Any:
    loaded = load_plugins()
    loaded.add_plugin(Plugin(), Provenance("my-processors", "1.0", "mine"))
    return loaded


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def config(checkpoint: Path, **more: Any) -> EngineConfig:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return EngineConfig(
        model=str(checkpoint), device=device, dtype="float32", skip_tokenizer_init=True,
        max_model_len=64, max_num_seqs=6, max_num_batched_tokens=48, operations="torch", **more,
    )  # fmt: skip


async def ask(engine: AsyncEngine, **more: Any) -> Any:
    params = SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False, **more)
    async for out in engine.generate([5, 6, 7], params):
        last = out
    return last


async def test_an_error_costs_its_own_requests_and_names_the_distribution(
    checkpoint: Path,
) -> None:
    async with AsyncEngine(config(checkpoint), plugins=plugins()) as engine:
        free = (await ask(engine, temperature=0.0)).outputs[0].token_ids
        results = await asyncio.gather(
            ask(engine, temperature=0.0),
            ask(engine, extra_args={"only": 9}, seed=1),
            ask(engine, extra_args={"only": "refuse"}),
            ask(engine, extra_args={"only": 11, "bow": 1.0}, logprobs=2, seed=1),
        )
        assert results[0].outputs[0].token_ids == free
        assert (
            results[1].outputs[0].token_ids == [9] * 6
            and results[3].outputs[0].token_ids == [11] * 6
        )
        assert len(results[3].outputs[0].logprobs) == 6
        assert "my-processors" in results[2].error and "not today" in results[2].error
        failed, spared = await asyncio.gather(
            ask(engine, extra_args={"only": "raise"}), ask(engine, temperature=0.0)
        )
        assert "my-processors" in failed.error and "boom" in failed.error
        assert spared.outputs[0].token_ids == free
        after = await ask(engine, extra_args={"only": 9})
        assert after.outputs[0].token_ids == [9] * 6
        assert engine.stats().kv_blocks_used == 0
    assert Only.ended >= 3


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_logits_cost_the_processors_own_requests_alone(
    checkpoint: Path, name: str
) -> None:
    async with AsyncEngine(config(checkpoint), plugins=plugins()) as engine:
        free = (await ask(engine, temperature=0.0)).outputs[0].token_ids
        failed, spared, other = await asyncio.gather(
            ask(engine, extra_args={"only": name}, temperature=0.0),
            ask(engine, temperature=0.0),
            ask(engine, extra_args={"bow": 1.0}, seed=1),
        )
        assert failed.outputs[0].finish_reason == "error" and "my-processors" in failed.error
        assert spared.outputs[0].token_ids == free and len(other.outputs[0].token_ids) == 6
        after = await ask(engine, extra_args={"only": 9}, temperature=0.0)
        assert after.outputs[0].token_ids == [9] * 6


async def test_what_nobody_reads_or_a_processor_refuses_is_named(checkpoint: Path) -> None:
    async with AsyncEngine(config(checkpoint), plugins=plugins()) as engine:
        with pytest.raises(InvalidRequest, match=r"'other'.*bow, only"):
            await ask(engine, extra_args={"other": 1})
        with pytest.raises(InvalidRequest, match="token id"):
            await ask(engine, extra_args={"only": "bad"})
        with pytest.raises(JackfieldError, match=r"my-processors.*check.*oh"):
            await ask(engine, extra_args={"only": "bug"})
        assert len((await ask(engine)).outputs[0].token_ids) == 6
    with pytest.raises(InvalidRequest, match="extra_args"):
        SamplingParams(extra_args={3: 1})  # type: ignore[dict-item]


async def test_the_configuration_says_which_are_active(checkpoint: Path) -> None:
    engine_config = config(checkpoint, logits_processors=("bow",))
    async with AsyncEngine(engine_config, plugins=plugins()) as engine:
        with pytest.raises(InvalidRequest, match=r"'only'.*there are: bow"):
            await ask(engine, extra_args={"only": 9})
    with pytest.raises(ConfigError, match=r"logits_processors.*'gone'"):
        async with AsyncEngine(config(checkpoint, logits_processors=("gone",)), plugins=plugins()):
            pass


class Direct(Bench):
    """A sampler with processors, in torch or by kernels."""

    def __init__(self, vocab_size: int, kernels: bool) -> None:
        super().__init__(vocab_size, slots=5)
        operations = None
        if kernels:
            pytest.importorskip("triton")
            from jackfield.core.worker.sampling.sampling_state import SamplingState
            from jackfield.plugins.operations.triton import TritonOperations

            operations = TritonOperations()
            self.state = SamplingState(5, vocab_size, self.device, self.history, kernels=True)
        setup = LogitsProcessorSetup(
            vocab_size=vocab_size, num_slots=4, max_model_len=64, device=self.device,
            history=self.history,
        )  # fmt: skip
        processors = [("only of tests", Only(setup)), ("bow of tests", Bow(setup))]
        self.processors = Processors(processors, self.device)
        self.sampler = Sampler(self.state, self.processors, operations)

    def begin(self, slot: int, **more: Any) -> None:
        self.start(slot, SamplingParams(**more), [1, 2], seed=slot)
        self.state.start(self.starts[slot], processed=self.processors.start(self.starts[slot]))

    def choose(self, rows: list[int], logits: torch.Tensor) -> list[int]:
        slots = torch.tensor(rows)
        lengths = torch.tensor([len(self.tokens[slot]) for slot in rows])
        self.state.upload()
        token_ids, _ = self.sampler.sample_eagerly(logits, slots, rows, lengths)
        tokens: list[int] = token_ids.tolist()
        for slot, token in zip(rows, tokens, strict=True):
            self.tokens[slot].append(token)
        return tokens


@pytest.mark.skipif(torch.cuda.is_available(), reason="the bench is on the CPU")
@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_processors_stand_where_they_should(kernels: bool) -> None:
    Only.shown, Bow.shown = [], []
    bench = Direct(40, kernels)
    bench.begin(0, temperature=0.0, extra_args={"only": 7}, presence_penalty=1.0)
    bench.begin(1, temperature=0.0, extra_args={"bow": 3.0})
    bench.begin(2, temperature=0.5, extra_args={"bow": 500.0}, logit_bias={4: 2.0})
    bench.begin(3, temperature=0.0)
    logits = torch.randn((4, 40), generator=torch.Generator().manual_seed(3))
    tokens = bench.choose([0, 1, 2, 3], logits)
    assert tokens[0] == 7 and tokens[1] == int(logits[1].argmax())
    assert tokens[3] == int(logits[3].argmax())
    assert Only.shown == [(0,)] and Bow.shown == [(2,)], "a greedy row, or one that did not ask"
    changes = Only.changes
    bench.choose([0, 1, 2, 3], logits)
    assert Only.changes == changes, "the same rows"
    bench.choose([3, 2, 1], logits[:3])
    assert len(Only.shown) == 2, "nobody asked for it"
    # Bow makes all tokens equal behind the temperature: then any is drawn.
    drawn = {bench.choose([2], logits[:1])[0] for _ in range(8)}
    assert len(drawn) > 3
    assert not bench.processors.failures([0, 1, 2, 3])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the bench is on the CPU")
def test_kernels_and_torch_agree_around_processors() -> None:
    benches = Direct(60, False), Direct(60, True)
    options: list[dict[str, Any]] = [
        {"extra_args": {"bow": 0.5}, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.4},
        {"extra_args": {"only": 8}, "logit_bias": {8: -2.0}, "logprobs": 2},
        {"top_k": 5, "frequency_penalty": 0.5, "allowed_token_ids": tuple(range(30))},
        {"temperature": 0.0, "extra_args": {"bow": 1.0}},
    ]
    for bench in benches:
        for slot, more in enumerate(options):
            bench.begin(slot, **more)
    for step in range(4):
        logits = torch.randn((4, 60), generator=torch.Generator().manual_seed(step)) * 2
        first, second = (bench.choose([2, 0, 3, 1], logits) for bench in benches)
        assert first == second
    assert torch.equal(benches[0].state.counts[:4], benches[1].state.counts[:4])
