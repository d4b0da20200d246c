"""Traffic through the scheduler, `PlanTiming` and `StepSizes` in virtual time, as the step
loop drives them: what would a change of policy do to first tokens?

    python tests/pacing_simulator.py --rate 33.7 --draws 12
    python tests/pacing_simulator.py --rate 33.7 --draws 12 --ttft-target-ms 0
    python tests/pacing_simulator.py --bursts --itl-target-ms 0

What the device and the host take is as it was traced of Qwen3-8B on an H200, prompts of 512 tokens
(docs/benchmarks/traffic.jsonl, `random, traced`).
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from scheduling_simulator import ByArrival

from jackfield.core.request import Request
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling.pacing.plan_timing import PlanTiming
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import StepPlan, StepResult
from jackfield.entrypoints.bench.report import percentile
from jackfield.entrypoints.bench.serve.load import arrivals

STEPS_IN_FLIGHT = 2


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """What a server takes, in seconds."""

    decode: float = 0.00445
    """A step of decode rows."""
    decode_row: float = 0.000042
    """More for each of its rows, up to `full_rows`; half of it for others."""
    full_rows: int = 40
    prompt_base: float = 0.003
    """A step with prompts."""
    prompt_token: float = 0.0000178
    """More for each of their tokens."""
    beside: float = 0.00145
    """More if decode rows are beside prompts."""
    beside_row: float = 0.000025
    spread: float = 0.03
    """Standard deviation of a step, as a share of it."""
    plan: float = 0.00017
    """The host's time from a plan to its launch, and for launching it."""
    launch: float = 0.0005
    prompt_plan: float = 0.0004
    prompt_launch: float = 0.0014
    result: float = 0.0002
    """From a step's end to its result."""
    client: float = 0.0025
    """From a client's request to its arrival, and from a result to the client."""

    def step(self, plan: StepPlan) -> float:
        """Return what a step takes the device."""
        prompts = sum(n for n in plan.num_tokens if n > 1)
        rows = plan.total_tokens - prompts
        if not prompts:
            more = min(rows, self.full_rows) + max(0, rows - self.full_rows) / 2
            return self.decode + self.decode_row * more
        alone = self.prompt_base + self.prompt_token * prompts
        return alone + (self.beside + self.beside_row * rows if rows else 0.0)


class Arrival(NamedTuple):
    """A request."""

    at: float
    prompt_len: int = 512
    output_len: int = 128


class Report(NamedTuple):
    """Seconds, as clients see them."""

    first_tokens: list[float]
    """From a request to its first token."""
    gaps: list[float]
    """Between tokens; of bursts, those of the streams beside them."""
    idle: float
    """In which the device waited for a launch though a plan was in flight."""


class _InFlight(NamedTuple):
    plan: StepPlan
    ends: float
    launched: float


def poisson(times: Sequence[float]) -> list[Arrival]:
    """Return equal requests at these times."""
    return [Arrival(at) for at in sorted(times)]


def bursts(streams: int = 128, size: int = 48, prompt_len: int = 1500) -> list[Arrival]:
    """Return streams, and prompts that come together every two seconds."""
    beside = [Arrival(0.0, 128, 900) for _ in range(streams)]
    return beside + [
        Arrival(2.0 * number, prompt_len, 1) for number in range(1, 5) for _ in range(size)
    ]


def simulate(
    requests: Sequence[Arrival],
    server: Server,
    *,
    ttft_target: float,
    itl_target: float = 0.0,
    seed: int = 0,
) -> Report:
    """Serve requests, in order of arrival, to their end."""
    draw = random.Random(seed)
    now = 0.0
    timing = PlanTiming(lambda: now)
    scheduler = Scheduler(
        max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192, num_blocks=40_000,
        block_size=16, enable_prefix_caching=False, enable_chunked_prefill=True,
        policy=ByArrival(), ttft_target=ttft_target, itl_target=itl_target,
    )  # fmt: skip
    report = Report([], [], 0.0)
    pending = deque(enumerate(requests))
    in_flight: deque[_InFlight] = deque()
    slots: dict[int, str] = {}
    arrived: dict[str, float] = {}
    latest: dict[str, float] = {}
    device_free = launch_free = idle = 0.0
    while pending or scheduler.has_work or in_flight:
        while pending and pending[0][1].at <= now:
            number, arrival = pending.popleft()
            arrived[str(number)] = arrival.at
            scheduler.add_requests(_request(number, arrival))
            timing.arrived()
        wake = None
        while len(in_flight) < STEPS_IN_FLIGHT:
            delay = timing.delay() if len(in_flight) == STEPS_IN_FLIGHT - 1 else 0.0
            if delay:
                wake = now + delay
                break
            plan = scheduler.schedule(timing.pace())
            if plan is None:
                break
            prompts = plan.total_tokens > len(plan.slots)
            host, launch = (
                (server.prompt_plan, server.prompt_launch)
                if prompts
                else (server.plan, server.launch)
            )
            launched = max(now + host, launch_free)
            launch_free = launched + launch
            if in_flight:
                idle += max(0.0, launch_free - device_free)
            seconds = server.step(plan) * max(0.5, draw.gauss(1.0, server.spread))
            device_free = max(launch_free, device_free) + seconds
            timing.submitted(plan, now)
            scheduler.submitted()
            slots.update((start.slot, start.request_id) for start in plan.starts)
            in_flight.append(_InFlight(plan, device_free + server.result, launched))
        events = [pending[0][1].at] if pending else []
        events += [in_flight[0].ends] if in_flight else []
        events += [wake] if wake is not None else []
        now = max(now, min(events))
        if in_flight and in_flight[0].ends <= now:
            plan, _, launched = in_flight.popleft()
            counts = list(map(int, plan.samples))
            result = StepResult(plan.step, counts, [7] * sum(counts), device_seconds=now - launched)
            timing.ended(plan, result)
            scheduler.update(plan, result)
            for slot, samples in zip(plan.slots, plan.samples, strict=True):
                if not samples:
                    continue
                name = slots[slot]
                if name in latest:
                    report.gaps.append(now - latest[name])
                else:
                    report.first_tokens.append(now - arrived[name] + server.client)
                latest[name] = now
    return report._replace(idle=idle)


def _request(number: int, arrival: Arrival) -> Request:
    return Request(
        request_id=str(number), prompt_token_ids=[number] * arrival.prompt_len,
        params=SamplingParams(), max_tokens=arrival.output_len, seed=number, arrival=arrival.at,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: simulate some draws of the arrivals, and print what came out."""
    parser = argparse.ArgumentParser(description="Simulate traffic in virtual time.")
    parser.add_argument("--rate", type=float, default=33.7, help="requests a second")
    parser.add_argument("--requests", type=int, default=400, help="of each draw")
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--bursts", action="store_true", help="of prompts, beside streams")
    parser.add_argument("--ttft-target-ms", type=float, default=50.0)
    parser.add_argument("--itl-target-ms", type=float, default=45.0)
    args = parser.parse_args(argv)
    first_tokens: list[float] = []
    gaps: list[float] = []
    for seed in range(args.draws):
        requests = poisson(arrivals(args.requests, args.rate, 1.0, seed=seed))
        report = simulate(
            bursts() if args.bursts else requests, Server(), seed=seed,
            ttft_target=args.ttft_target_ms / 1e3, itl_target=args.itl_target_ms / 1e3,
        )  # fmt: skip
        first_tokens += report.first_tokens
        gaps += report.gaps
    for name, values in (("first token", first_tokens), ("between tokens", gaps)):
        shares = "  ".join(
            f"p{percent} {1e3 * percentile(values, percent):6.2f}" for percent in (50, 90, 99)
        )
        print(f"{name:>15}  {shares}  mean {1e3 * sum(values) / len(values):6.2f} ms")


if __name__ == "__main__":
    main()
