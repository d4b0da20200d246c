"""Drives the scheduler with synthetic or recorded traffic, in virtual time, without a model.

    python tests/scheduling_simulator.py --requests 10000
    python tests/scheduling_simulator.py --trace traffic.jsonl --num-blocks 4096

A trace has one `Arrival` a line, as JSON: {"arrival": 0.5, "prompt_len": 9, "output_len": 3}.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from jackfield.core.cache.groups import CacheGroup
from jackfield.core.cache.reach import Reach
from jackfield.core.outputs import EngineStats
from jackfield.core.request import Request
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import StepPlan, StepResult


class Arrival(msgspec.Struct, frozen=True):
    """One request of the traffic."""

    arrival: float
    """Seconds since the start."""
    prompt_len: int
    output_len: int


class StepTime(msgspec.Struct, frozen=True):
    """Seconds that a step takes: base + per_token * tokens."""

    base: float = 0.008
    per_token: float = 0.00001


class Report(msgspec.Struct, kw_only=True):
    """What came out. Times are virtual seconds, except `wall_seconds`."""

    requests: int
    refused: int
    steps: int
    virtual_seconds: float
    wall_seconds: float
    budget_use: float
    """Mean share of a step's token budget that was used."""
    kv_use_mean: float
    kv_use_peak: float
    queueing_p50: float
    """Arrival to the start of the first step that computes the request."""
    queueing_p99: float
    preemptions: int
    tokens_per_second: float
    """Generated, in virtual time."""
    scheduler_us_per_step: float
    """Wall time of `schedule` and `update`."""


class ByArrival:
    """First come first served."""

    def key(self, request: Request) -> tuple[float, ...]:
        return (request.arrival,)


def synthetic_traffic(
    num_requests: int, *, rate: float, prompt_len: int, output_len: int, seed: int = 0
) -> list[Arrival]:
    """Poisson arrivals, `rate` a second; lengths exponential around their means."""
    rng = random.Random(seed)
    now = 0.0
    traffic = []
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        lengths = (1 + int(rng.expovariate(1 / mean)) for mean in (prompt_len, output_len))
        traffic.append(Arrival(now, *lengths))
    return traffic


def recorded_traffic(path: Path) -> list[Arrival]:
    """Read a trace. Raises msgspec.ValidationError on a wrong line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [msgspec.json.decode(line, type=Arrival) for line in lines if line.strip()]


def simulate(
    traffic: Iterable[Arrival],
    scheduler: Scheduler,
    step_time: StepTime | None = None,
    *,
    max_in_flight: int = 2,
    seed: int = 0,
    admits: Callable[[EngineStats], bool] = lambda stats: True,
) -> Report:
    """Serve the traffic to its end. Requests that cannot fit the scheduler are cut to fit; one that
    `admits` refuses, with what the engine does when it arrives, is gone."""
    started = time.perf_counter()
    step_time = step_time or StepTime()
    rng = random.Random(seed)
    pending = deque(
        _request(number, arrival, scheduler, rng)
        for number, arrival in enumerate(sorted(traffic, key=lambda a: a.arrival))
    )
    num_requests, num_refused = len(pending), 0
    waits: dict[str, float] = {}
    arrivals = {request.request_id: request.arrival for request in pending}
    in_flight: deque[tuple[StepPlan, float]] = deque()
    now = device_free = scheduling = budget_use = kv_use = kv_peak = 0.0

    while pending or scheduler.has_work or in_flight:
        while pending and pending[0].arrival <= now:
            request = pending.popleft()
            if admits(scheduler.stats):
                scheduler.add_requests(request)
            else:
                num_refused += 1
        plan = None
        if len(in_flight) < max_in_flight:
            clock = time.perf_counter()
            plan = scheduler.schedule()
            scheduling += time.perf_counter() - clock
        if plan is not None:
            start = max(now, device_free)
            device_free = start + step_time.base + step_time.per_token * plan.total_tokens
            in_flight.append((plan, device_free))
            for slot_start in plan.starts:
                waits.setdefault(slot_start.request_id, start - arrivals[slot_start.request_id])
            usage = scheduler.kv.usage
            kv_use += usage
            kv_peak = max(kv_peak, usage)
            budget_use += plan.total_tokens / scheduler.max_num_batched_tokens
        elif in_flight:
            plan, done = in_flight.popleft()
            now = max(now, done)
            result = StepResult(plan.step, list(map(int, plan.samples)), [7] * sum(plan.samples))
            clock = time.perf_counter()
            scheduler.update(plan, result)
            scheduling += time.perf_counter() - clock
        else:
            now = max(now, pending[0].arrival)

    stats = scheduler.stats
    queueing = sorted(waits.values())
    return Report(
        requests=num_requests,
        refused=num_refused,
        steps=stats.steps,
        virtual_seconds=now,
        wall_seconds=time.perf_counter() - started,
        budget_use=budget_use / max(1, stats.steps),
        kv_use_mean=kv_use / max(1, stats.steps),
        kv_use_peak=kv_peak,
        queueing_p50=_percentile(queueing, 0.50),
        queueing_p99=_percentile(queueing, 0.99),
        preemptions=stats.num_preemptions,
        tokens_per_second=stats.generation_tokens / now if now else 0.0,
        scheduler_us_per_step=1e6 * scheduling / max(1, stats.steps),
    )


def _request(number: int, arrival: Arrival, scheduler: Scheduler, rng: random.Random) -> Request:
    longest = scheduler.limits.longest_sequence()
    prompt_len = min(arrival.prompt_len, longest - 1)
    return Request(
        request_id=str(number),
        prompt_token_ids=[rng.getrandbits(16)] * prompt_len,
        params=SamplingParams(),
        max_tokens=min(arrival.output_len, longest - prompt_len),
        seed=number,
        arrival=arrival.arrival,
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _windows(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: run one simulation and print its report."""
    parser = argparse.ArgumentParser(description="Simulate the scheduler in virtual time.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--trace", type=Path, help="JSON lines instead of synthetic traffic")
    parser.add_argument("--rate", type=float, default=40.0, help="arrivals a second")
    parser.add_argument("--prompt-len", type=int, default=512, help="mean")
    parser.add_argument("--output-len", type=int, default=64, help="mean")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--num-blocks", type=int, default=4096)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--windows", type=_windows, default=(), metavar="TOKENS,TOKENS,…",
        help="sliding windows of groups of layers beside the one that keeps everything",
    )  # fmt: skip
    parser.add_argument("--step-base", type=float, default=StepTime().base, help="seconds")
    parser.add_argument("--step-per-token", type=float, default=StepTime().per_token)
    parser.add_argument("--in-flight", type=int, default=2, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    traffic = (
        recorded_traffic(args.trace)
        if args.trace
        else synthetic_traffic(
            args.requests,
            rate=args.rate,
            prompt_len=args.prompt_len,
            output_len=args.output_len,
            seed=args.seed,
        )
    )
    scheduler = Scheduler(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        policy=ByArrival(),
        groups=(CacheGroup(), *(CacheGroup(reach=Reach(window)) for window in args.windows)),
    )
    report = simulate(
        traffic,
        scheduler,
        StepTime(args.step_base, args.step_per_token),
        max_in_flight=args.in_flight,
        seed=args.seed,
    )
    for name, value in msgspec.structs.asdict(report).items():
        print(f"{name:>22}  {value:,.3f}" if isinstance(value, float) else f"{name:>22}  {value:,}")


if __name__ == "__main__":
    main()
