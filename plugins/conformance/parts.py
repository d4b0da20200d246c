"""`PartKit`: whether a part keeps the contract of both halves.

    class TestMine(PartKit):
        name = "mine"                               # as registered
        own_options = {"size": 3}                   # if it needs any

Requests that address the part are made of its `examples`. The kit does not judge what the part is
for.
"""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from ...core.config import EngineConfig
from ...core.engine.async_engine import AsyncEngine
from ...core.errors import InvalidRequest
from ...core.parts.exclusions import MODELS, OPTIONS
from ...core.protocols.parts import StepPart
from ...core.sampling_params import OutputKind, SamplingParams
from ...core.step import PartPlan, SlotStart, StepPlan
from ...core.worker.batch import LogitRows
from ...core.worker.parts.part import WorkerPart
from ...core.worker.runner import ModelRunner
from .kit import Kit
from .part_traffic import LONGEST, NUM_SLOTS, Setup, Traffic, num_elements

SEEDS = (1, 2, 3)
JUNK: tuple[Any, ...] = (
    None, True, 0, -1, 2.5, 1e30, float("inf"), float("nan"), 2**62, "", "x", "x" * 70_000, [], [3],
    {}, {"a": [1]},
)  # fmt: skip
"""Values of `extra_args` that a caller may send."""


class PartKit(Kit):
    """Subclass it, and set the name."""

    kind = "part"
    own_options: ClassVar[dict[str, Any]] = {}
    """Its options in `EngineConfig.parts`."""
    keeps: ClassVar[int] = 0
    """Most elements of containers by which either half grows for good, such as a cache's."""
    patience: ClassVar[float] = 60.0
    """Seconds after which an engine's requests will never end; those of a good part need two."""

    # ------------------------------------------------------------ what the tests are made of

    @classmethod
    def part(cls) -> type[StepPart]:
        """Return the part."""
        part: type[StepPart] = cls.registered()
        return part

    @classmethod
    def new_setup(cls) -> Setup:
        """Start a worker with the part."""
        return Setup(cls.plugins(), {cls.name: cls.own_options})

    @classmethod
    @functools.cache
    def setup_with(cls) -> Setup:
        """Return a worker with the part, which the tests share."""
        return cls.new_setup()

    @classmethod
    def examples(cls) -> list[dict[str, Any]]:
        """Return `extra_args` that address the part."""
        return [dict(each) for each in cls.part().examples if each]

    def traffic(self, seed: int, **more: Any) -> Traffic:
        """Return traffic half of which addresses the part."""
        return Traffic(self.setup_with(), self.name, seed, self.examples(), **more)

    # ------------------------------------------------------------ what it declares

    def test_what_it_declares_fits_together(self) -> None:
        """Options and structs are msgspec's; examples have its parameters alone, and it accepts
        them; what it excludes is there."""
        part = self.part()
        assert issubclass(part.options, msgspec.Struct)
        for kind, base in (
            (part.start_type, msgspec.Struct),
            (part.plan_type, PartPlan),
            (part.result_type, msgspec.Struct),
        ):
            assert kind is None or issubclass(kind, base), f"{kind} is no {base.__name__}"
        assert bool(part.parameters) == bool(self.examples()), "examples address it, and only they"
        for example in self.examples():
            assert set(example) <= part.parameters, f"{example}: it reads {set(part.parameters)}"
            part.check(SamplingParams(extra_args=example))
        known = {*OPTIONS, *MODELS, *self.plugins()[self.kind]}
        assert set(part.excludes) <= known, f"excludes: there are {sorted(known)}"
        assert all(isinstance(reason, str) and reason for reason in part.excludes.values())

    def test_other_values_are_refused_or_served(self) -> None:
        """`check` raises InvalidRequest with a field's name, or the halves can use the value."""
        part, accepted = self.part(), []
        for example in self.examples():
            for key in example:
                changed = [{**example, key: junk} for junk in JUNK]
                for extra in ({k: v for k, v in example.items() if k != key}, *changed):
                    if extra and self._accepts(part, extra):
                        accepted.append(extra)
        if not accepted:
            return
        traffic = Traffic(self.setup_with(), self.name, 5, accepted, disturbed=False)
        traffic.run(2 * len(accepted))

    @staticmethod
    def _accepts(part: type[StepPart], extra: Mapping[str, Any]) -> bool:
        try:
            part.check(SamplingParams(extra_args=dict(extra)))
        except InvalidRequest as error:
            assert error.param, f"{extra!s:.99}: the error has no `param`"
            return False
        return True

    # ------------------------------------------------------------ traffic

    @pytest.mark.parametrize("seed", SEEDS)
    def test_random_traffic_ends(self, seed: int) -> None:
        """With aborts, preemptions, chunks, failed steps and two steps in flight: blocks, slots and
        queues agree after each step, rows have no more tokens than they may, what is sent has its
        type and comes out of its bytes, and each request gets its last update."""
        traffic = self.traffic(seed)
        traffic.run(30)
        assert traffic.num_aborted and traffic.scheduler.stats.num_preemptions, "too quiet"
        msgspec.msgpack.encode(traffic.scheduler.stats)

    def test_an_engine_never_stands_still(self) -> None:
        """Undisturbed: nothing but the part keeps a request from its end."""
        self.traffic(11, disturbed=False).run(25)

    def test_requests_that_do_not_address_it_get_the_same_tokens(self) -> None:
        """In the same steps, as without the part."""
        outputs = []
        for setup in (_without(), self.setup_with()):
            traffic = Traffic(setup, self.name, 7)
            traffic.run(20)
            tokens = [(asked.tokens, asked.error) for asked in traffic.asked]
            outputs.append((tokens, traffic.scheduler.num_steps))
        assert outputs[0] == outputs[1]

    def test_requests_beside_those_that_address_it_get_their_tokens(self) -> None:
        """What it does to a request is not done to others: they end with all their tokens, without
        an error."""
        traffic = self.traffic(13, disturbed=False)
        traffic.run(25)
        for asked in traffic.asked:
            assert asked.addresses or (asked.tokens and asked.error is None), asked.error

    def test_nothing_is_remembered_of_requests_that_have_ended(self) -> None:
        """Neither half grows with the requests that it has seen, nor keeps one alive."""
        traffic = self.traffic(17)
        halves = [
            half
            for half in (traffic.scheduler_half, self.setup_with().worker_half(self.name))
            if half is not None
        ]
        before = [num_elements(half) for half in halves]
        for _ in range(2):
            traffic.run(20)
            runner = self.setup_with().worker.runner
            assert runner is not None
            runner.forget_slots()
            after = [num_elements(half) for half in halves]
            for half, old, new in zip(halves, before, after, strict=True):
                assert new - old <= self.keeps, f"{type(half).__name__} keeps {new - old} elements"
        gc.collect()
        assert not traffic.remembered, f"still referred to: {traffic.remembered}"

    # ------------------------------------------------------------ the worker half

    def worker_half(self, setup: Setup) -> WorkerPart:
        """Return the worker half; skips the test where there is none."""
        half = setup.worker_half(self.name)
        if half is None:
            pytest.skip("it has no worker half")
        return half

    def starts(self) -> list[SlotStart]:
        """Return starts of slots, each of a request that addresses the part."""
        traffic = Traffic(self.setup_with(), self.name, 19, self.examples(), disturbed=False)
        starts: list[SlotStart] = []
        schedule = traffic.scheduler.schedule

        def watched(*arguments: Any) -> StepPlan | None:
            plan = schedule(*arguments)
            starts.extend(() if plan is None else plan.starts)
            return plan

        traffic.scheduler.schedule = watched  # type: ignore[assignment,method-assign]
        traffic.run(12)
        return [start for start in starts if start.params.extra_args]

    def test_a_slot_that_is_released_is_forgotten(self) -> None:
        """`release` may come twice, and for a slot that was never taken; a slot that starts again
        has nothing of the request before."""
        half = self.worker_half(self.new_setup())
        starts, empty = self.starts(), num_elements(half)
        for start in starts:
            plain = msgspec.structs.replace(
                start, parts={}, params=msgspec.structs.replace(start.params, extra_args=None)
            )
            half.start(plain)
            as_plain = num_elements(half)
            half.start(start)
            half.start(plain)
            assert num_elements(half) == as_plain, "a slot has something of the request before"
            half.start(start)
            for _ in range(2):
                half.release(start.slot)
                assert num_elements(half) == empty, "something is left of a released slot"
        half.release(NUM_SLOTS - 1)

    def test_what_layers_find_depends_on_addresses_alone(self) -> None:
        """So that a recorded step can be replayed with other numbers."""
        half = self.worker_half(self.setup_with())
        runner = self.setup_with().worker.runner
        assert isinstance(runner, ModelRunner)
        plan = StepPlan(step=0, slots=(0, 1), num_tokens=(1, 1), samples=(True, True))
        runner.forget_slots()
        with torch.inference_mode():
            rows = runner.batch.rows(plan)
            writes = runner.batch.table.writes(plan)
            inputs = runner.batch.lay_out(rows, LogitRows.sampled(rows, plan.samples), writes)
            first = _addresses(half.context(inputs))
            for tensor in (inputs.input_ids, inputs.positions, inputs.slots):
                tensor.add_(1)
            assert _addresses(half.context(inputs)) == first
            hidden = torch.ones(2, self.setup_with().model_config.hidden_size)
            for states in (hidden, -3 * hidden, (hidden, hidden)):
                half.computed(inputs, states)
        runner.forget_slots()

    # ------------------------------------------------------------ an engine

    def test_an_engine_serves_with_it(self) -> None:
        """All at once, with an abort: others get the tokens that they get alone."""
        prompts = [[20 + number] * (3 + 9 * number) for number in range(4)]
        plain = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY
        )
        config = EngineConfig(
            device="cpu", dtype="float32", attention_backend="torch", block_size=4,
            max_model_len=LONGEST, max_num_seqs=NUM_SLOTS, num_gpu_blocks_override=40,
            parts={self.name: self.own_options},
        )  # fmt: skip

        async def generate(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> Any:
            return [output async for output in engine.generate(prompt, params)][-1]

        async def serve() -> None:
            without = msgspec.structs.replace(config, parts={})
            async with AsyncEngine(without, plugins=self.plugins()) as engine:
                alone = [await generate(engine, prompt, plain) for prompt in prompts]
            async with AsyncEngine(config, plugins=self.plugins()) as engine:
                addressing = [
                    msgspec.structs.replace(plain, extra_args=extra) for extra in self.examples()
                ]
                others = [
                    asyncio.ensure_future(generate(engine, prompts[1], params))
                    for params in addressing
                ]
                if addressing:
                    stream = engine.generate(prompts[0], addressing[0], request_id="aborted")
                    first_output = asyncio.ensure_future(anext(stream))
                    await asyncio.sleep(0)
                    await engine.abort("aborted")
                    await first_output
                together = await asyncio.gather(*(generate(engine, p, plain) for p in prompts))
                await asyncio.gather(*others)
                tokens = [output.outputs[0].token_ids for output in together]
                assert tokens == [output.outputs[0].token_ids for output in alone]
                assert engine.healthy, engine.dead_reason
                assert engine.stats().kv_blocks_used == 0

        asyncio.run(asyncio.wait_for(serve(), self.patience))


@functools.cache
def _without() -> Setup:
    """Return a worker without external parts."""
    return Setup(Kit.plugins(), {})


def _addresses(found: Any) -> Any:
    """Return the addresses that a recorded step would keep."""
    if isinstance(found, torch.Tensor):
        return found.data_ptr(), tuple(found.shape), found.dtype
    if isinstance(found, Mapping):
        return {key: _addresses(value) for key, value in found.items()}
    if isinstance(found, tuple | list):
        return [_addresses(value) for value in found]
    if hasattr(found, "__dict__"):
        return {key: _addresses(value) for key, value in vars(found).items()}
    return found
