"""Random traffic for a part: a scheduler and a worker, step by step, in one thread."""

from __future__ import annotations

import json
import random
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import msgspec
import torch

from ...core.config import EngineConfig
from ...core.engine.resolve_config import resolve_config, resolve_runner
from ...core.engine.scheduler_parts import scheduler_parts
from ...core.loading.model_config import resolve_model_config
from ...core.protocols.executors import ExecutorInfo
from ...core.registration.step_parts import active_parts, part_types
from ...core.registry import Plugins
from ...core.request import Request, RequestSpec, Update
from ...core.sampling_params import SamplingParams
from ...core.scheduling.parts.part import SchedulerPart
from ...core.scheduling.scheduler import Scheduler
from ...core.step import Recover, StepPlan, StepResult
from ...core.worker.parts.part import WorkerPart
from ...core.worker.runner import ModelRunner
from ...core.worker.threads import PendingStep
from ...core.worker.worker import Worker
from ..policies.builtin import FirstComeFirstServed

PLANS, RESULTS = msgspec.msgpack.Decoder(StepPlan), msgspec.msgpack.Decoder(StepResult)
NUM_SLOTS, BUDGET, BLOCK, LONGEST = 4, 16, 4, 48
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64,
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "eos_token_id": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
MOST_STEPS = 3000
"""Of a traffic; the slowest good part needs a tenth."""


class Setup:
    """A worker with a part, or without one, that has started."""

    def __init__(self, plugins: Plugins, parts: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODEL))
            self._start(folder, plugins, parts)

    def _start(self, folder: str, plugins: Plugins, parts: Mapping[str, Any]) -> None:
        given = EngineConfig(
            model=folder, device="cpu", dtype="float32", load_format="dummy",
            attention_backend="torch", skip_tokenizer_init=True,
            block_size=BLOCK, max_model_len=LONGEST,
            max_num_seqs=NUM_SLOTS, max_num_batched_tokens=BUDGET, num_gpu_blocks_override=18,
            parts=dict(parts),
        )  # fmt: skip
        config = resolve_config(given, plugins)
        model_config = resolve_model_config(config, plugins)
        self.config, self.model_config = resolve_runner(given, config, model_config, plugins)
        self.plugins = plugins
        self.types = part_types(plugins, self.config)
        self.worker = Worker(self.config, self.model_config, plugins)
        self.info: ExecutorInfo = self.worker.start()

    def scheduler(self) -> Scheduler:
        """Make a scheduler for the worker, which forgets all slots."""
        self.worker.run_job(Recover())
        return Scheduler(
            max_num_seqs=NUM_SLOTS,
            max_num_batched_tokens=BUDGET,
            max_model_len=LONGEST,
            num_blocks=self.info.num_blocks,
            block_size=BLOCK,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            policy=FirstComeFirstServed(),
            groups=self.info.cache_groups,
            parts=scheduler_parts(self.config, self.info, LONGEST, None, self.plugins),
        )

    def worker_half(self, name: str) -> WorkerPart | None:
        """Return the worker half; None: the part has none."""
        runner = self.worker.runner
        assert isinstance(runner, ModelRunner)
        return next((part for part in runner.parts if part.name == name), None)

    def sent_kinds(self, name: str) -> dict[str, type | None]:
        """Return the structs that the part says it sends, by where."""
        part, _ = active_parts(self.plugins, self.config)[name]
        return {"start": part.start_type, "plan": part.plan_type, "result": part.result_type}


@dataclass
class Asked:
    """A request of a traffic."""

    request: weakref.ref[Request]
    addresses: bool
    """Whether it addresses the part."""
    tokens: list[int] = field(default_factory=list)
    error: str | None = None
    ended: bool = False


class Traffic:
    """Requests that come, run, are preempted and aborted, and end; steps in flight, and some that
    fail. The same seed makes the same traffic, for the same plans."""

    def __init__(
        self,
        setup: Setup,
        name: str,
        seed: int,
        addressing: Sequence[Mapping[str, Any]] = (),
        *,
        disturbed: bool = True,
    ) -> None:
        """name: of the part. addressing: `extra_args` of requests, half of which have none.
        disturbed: requests are preempted and aborted, and steps fail."""
        self.setup, self.name = setup, name
        self.scheduler = setup.scheduler()
        self.draw = random.Random(seed)
        self.addressing, self.disturbed = addressing, disturbed
        self.asked: list[Asked] = []
        self._by_id: dict[str, Asked] = {}
        self._flying: deque[tuple[StepPlan, PendingStep]] = deque()
        self.sent: dict[str, set[type]] = {"start": set(), "plan": set(), "result": set()}
        """What the part has sent, by where."""
        self.num_failed = self.num_aborted = 0
        self._check_answers()

    @property
    def scheduler_half(self) -> SchedulerPart | None:
        """The scheduler half; None: the part has none."""
        parts = self.scheduler._parts
        return next((part for part in parts if part.name == self.name), None)

    def _check_answers(self) -> None:
        """Check the rows and token numbers that parts allow."""
        parts = self.scheduler._parts

        def bounded(call: Callable[..., int], method: str) -> Callable[..., int]:
            def checked(request: Request, count: int, *more: int) -> int:
                got = call(request, count, *more)
                assert isinstance(got, int) and 0 <= got <= count, (
                    f"{method} gives {got!r} for a row of {count} tokens"
                )
                return got

            return checked

        def ordered(call: Callable[..., list[Request]]) -> Callable[..., list[Request]]:
            def checked(requests: list[Request]) -> list[Request]:
                got, rest = call(requests[:]), iter(requests)
                assert all(request in rest for request in got), (
                    "eligible gives requests that it did not get, or in another order"
                )
                return got

            return checked

        parts.eligible = tuple(ordered(call) for call in parts.eligible)
        parts.decode_tokens = tuple(bounded(c, "decode_tokens") for c in parts.decode_tokens)
        parts.chunk_tokens = tuple(bounded(c, "chunk_tokens") for c in parts.chunk_tokens)

    def run(self, num_requests: int) -> None:
        """Run so many more requests to their end."""
        left, steps = num_requests, 0
        while left or self.scheduler.has_work or self._flying:
            steps += 1
            assert steps < MOST_STEPS, f"requests never end: {self._unfinished()}"
            if left and self.draw.random() < 0.3:
                left -= self._ask()
            if self.disturbed and self.draw.random() < 0.04:
                self._abort()
            if self.disturbed and self.draw.random() < 0.04:
                self._preempt()
            planned = len(self._flying) < 2 and self._plan()
            if self._flying and (not planned or self.draw.random() < 0.6):
                self._finish()
            elif not planned and not left:
                assert not self.scheduler.requests.by_id, (
                    f"no step is planned, and none is in flight, but there are requests: "
                    f"{self._unfinished()}"
                )
        assert all(asked.ended for asked in self.asked), "a request has no last update"

    def _unfinished(self) -> list[str]:
        requests = self.scheduler.requests.by_id.values()
        return [f"{r.external_id} {r.params.extra_args} is {r.status.value}" for r in requests]

    def _ask(self) -> int:
        draw = self.draw
        prompt = [draw.randrange(10, 14) for _ in range(draw.choice((1, 3, 9, 17, 25)))]
        extra = None
        if self.addressing and draw.random() < 0.6:
            extra = dict(draw.choice(self.addressing))
        params = SamplingParams(
            n=draw.choice((1, 1, 1, 2)), temperature=1.0, ignore_eos=True, extra_args=extra
        )
        spec = RequestSpec(
            request_id=f"r{len(self.asked)}", prompt_token_ids=prompt, params=params,
            max_tokens=draw.randrange(1, 20),
        )  # fmt: skip
        requests = spec.requests(seed=draw.randrange(99))
        for request in requests:
            asked = Asked(weakref.ref(request), extra is not None)
            self.asked.append(asked)
            self._by_id[request.request_id] = asked
        self.scheduler.add_requests(*requests)
        return 1

    def _abort(self) -> None:
        if ids := list(self.scheduler.requests.by_id):
            chosen = self.draw.choice(ids)
            self.num_aborted += 1
            self.scheduler.finish_request(chosen, "abort")
            self._by_id.pop(chosen).ended = True

    def _preempt(self) -> None:
        if running := self.scheduler.requests.running.requests:
            self.scheduler.requests.preempt(self.draw.choice(running))

    def _plan(self) -> bool:
        plan = self.scheduler.schedule()
        self._note(self.scheduler.take_failures())
        self.scheduler.check_invariants()
        if plan is None:
            return False
        self._check_sent(plan.parts, "plan")
        for start in plan.starts:
            self._check_sent(start.parts, "start")
        received = self.setup.types.plan(PLANS.decode(msgspec.msgpack.encode(plan)))
        assert received == plan, "what the plan carries is not what comes out of its bytes"
        in_process = self.scheduler.in_process(plan)
        self._flying.append((plan, self.setup.worker.step(received, in_process)))
        self.scheduler.submitted()
        return True

    def _check_sent(self, parts: Mapping[str, Any], where: str) -> None:
        if (struct := parts.get(self.name)) is not None:
            kind = self.setup.sent_kinds(self.name)[where]
            assert kind is not None and type(struct) is kind, (
                f"{where}_type is {kind}, and the part sends {type(struct)}"
            )
            self.sent[where].add(type(struct))

    def _finish(self) -> None:
        if self.disturbed and self.draw.random() < 0.04:
            self._fail()
            return
        plan, step = self._flying.popleft()
        result = step.wait()
        self._check_sent(result.parts, "result")
        received = self.setup.types.result(RESULTS.decode(msgspec.msgpack.encode(result)))
        assert received == result, "what the result carries is not what comes out of its bytes"
        self._note(self.scheduler.update(plan, received))
        self.scheduler.check_invariants()

    def _fail(self) -> None:
        """Fail the oldest step; later ones are not run."""
        plan, _ = self._flying.popleft()
        self._flying.clear()
        self.num_failed += 1
        self.setup.worker.run_job(Recover())
        self._note(self.scheduler.fail_step(plan, "on purpose"))
        self.scheduler.check_invariants()

    def _note(self, updates: Collection[Update]) -> None:
        for update in updates:
            asked = self._by_id.get(update.request.request_id)
            assert asked is not None, "an update of a request that has ended"
            asked.tokens += update.new_token_ids
            asked.error = asked.error or update.error
            if update.finished:
                asked.ended = True
                del self._by_id[update.request.request_id]

    @property
    def remembered(self) -> list[str]:
        """Requests that have ended, and still exist. Collect garbage before."""
        return [each.external_id for asked in self.asked if (each := asked.request()) is not None]


def num_elements(part: object) -> int:
    """Count the elements of all containers that a part holds, directly or in objects of its own."""
    return sum(len(container) for container in _containers(part))


def _containers(part: object) -> Iterator[Collection[Any]]:
    seen: set[int] = set()
    stack: list[Any] = [part]
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, _NOT_FOLLOWED):
            continue
        seen.add(id(thing))
        if isinstance(thing, dict):
            yield thing
            stack += [*thing, *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset | deque):
            yield thing
            stack += thing
        elif thing is part or not type(thing).__module__.startswith("jackfield.core."):
            stack += getattr(thing, "__dict__", {}).values()
            slots = getattr(type(thing), "__slots__", ())
            names = [slots] if isinstance(slots, str) else slots
            stack += [getattr(thing, name) for name in names if hasattr(thing, name)]


_NOT_FOLLOWED = (
    str, bytes, int, float, type(None), type, ModuleType, FunctionType, MethodType,
    BuiltinFunctionType, torch.Tensor, torch.nn.Module, weakref.ref,
)  # fmt: skip
