"""Microseconds that rank 0's event loop gives to plan a decode step and to send it to other ranks.

    python examples/benchmarks/plan_transport.py --followers 3

Plans are the scheduler's, of requests whose prompts differ in length, so that in each step some get
a block. They go through connections as those of the executor `processes` (socket pairs) and `ray`
(TCP), and with `--ray` also by calls of Ray's actors with the same bytes (needs the package `ray`).
The other side only reads. All processes are on this host: the network is not in the numbers.

Medians of all steps. "later" is what the loop does after sending, while the device computes: it
gives names to full blocks. The yardstick is a piece of Python that does not change, measured
between the steps: divide by it to compare runs on a host that others use, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from jackfield.core.parallel.join import listen
from jackfield.core.request import Request
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import StepPlan, StepResult
from jackfield.plugins.executors.connections import Reception
from jackfield.plugins.executors.messages import PlanRows
from jackfield.plugins.policies.builtin import FirstComeFirstServed

STEPS = 600
PAUSE_SECONDS = 0.002
"""Between steps, in which the others read: as long as a short step."""
IN_FLIGHT = 2
PAIR_READER = """
import socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
while connection.recv(1 << 16):
    pass
"""
TCP_READER = """
import sys
from jackfield.plugins.executors.connections import connect
connection = connect(("127.0.0.1", int(sys.argv[1])), bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
while connection.recv(1 << 16):
    pass
"""


class Times(NamedTuple):
    """Microseconds of one step."""

    plan: float
    send: float
    later: float
    yardstick: float


def decoding(rows: int) -> Scheduler:
    """Return a scheduler with requests that do not end."""
    draw = random.Random(0)
    scheduler = Scheduler(
        max_num_seqs=rows,
        max_num_batched_tokens=1 << 16,
        max_model_len=1 << 13,
        num_blocks=1 + rows * 80,
        block_size=16,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        policy=FirstComeFirstServed(),
    )
    for number in range(rows):
        scheduler.add_requests(
            Request(
                request_id=str(number),
                prompt_token_ids=[draw.randrange(1 << 15) for _ in range(draw.randrange(20, 60))],
                params=SamplingParams(ignore_eos=True, max_tokens=2 * STEPS),
                max_tokens=2 * STEPS,
                seed=number,
            )
        )
    return scheduler


def yardstick() -> float:
    """Return the microseconds of some Python."""
    began = time.perf_counter()
    sum(number * number for number in range(1000))
    return 1e6 * (time.perf_counter() - began)


async def measured(send: Callable[[bytes], object], rows: int) -> Times:
    """Return medians over steps."""
    scheduler, encoder = decoding(rows), PlanRows()
    times: list[Times] = []
    in_flight: list[StepPlan] = []
    for number in range(STEPS):
        began = time.perf_counter()
        plan = scheduler.schedule()
        assert plan is not None
        planned = time.perf_counter()
        send(encoder.encode_step(number, plan))
        sent = time.perf_counter()
        scheduler.submitted()
        done = time.perf_counter()
        seconds = (planned - began, sent - planned, done - sent)
        times.append(Times(*(1e6 * each for each in seconds), yardstick()))
        in_flight.append(plan)
        if len(in_flight) == IN_FLIGHT:
            first = in_flight.pop(0)
            counts = list(map(int, first.samples))
            scheduler.update(first, StepResult(first.step, counts, [7] * sum(counts)))
        await asyncio.sleep(PAUSE_SECONDS)
    return Times(*map(statistics.median, zip(*times[STEPS // 10 :], strict=True)))


@contextlib.asynccontextmanager
async def by_pairs(followers: int) -> AsyncIterator[Callable[[bytes], object]]:
    """Yield a function that writes to each socket."""
    pairs = [socket.socketpair() for _ in range(followers)]
    processes = []
    for _, other in pairs:
        number = other.fileno()
        processes.append(
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", PAIR_READER, str(number), pass_fds=(number,)
            )
        )
        other.close()

    def send(frame: bytes) -> None:
        for own, _ in pairs:
            own.sendall(frame)

    yield send
    for own, _ in pairs:
        own.close()
    for process in processes:
        await process.wait()


@contextlib.asynccontextmanager
async def by_tcp(followers: int) -> AsyncIterator[Callable[[bytes], object]]:
    """Yield a function that writes to each socket."""
    reception = Reception(listen(), range(1, followers + 1))
    greeting = [str(reception.address[1]), reception.secret.hex()]
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", TCP_READER, *greeting, str(rank))
        for rank in reception.connections
    ]
    await asyncio.gather(*reception.connections.values())
    sockets = [reception.take(rank) for rank in range(1, followers + 1)]

    def send(frame: bytes) -> None:
        for each in sockets:
            assert each.send(frame) == len(frame)

    yield send
    for each in sockets:
        each.close()
    for process in processes:
        await process.wait()
    await reception.close()


@contextlib.asynccontextmanager
async def by_ray(followers: int) -> AsyncIterator[Callable[[bytes], object]]:
    """Yield a function that calls a method of each actor."""
    import ray

    class Reader:
        def take(self, frame: bytes) -> None:
            pass

    ray.init(address="local", num_cpus=followers, include_dashboard=False, logging_level="error")
    actors = [ray.remote(Reader).options(num_cpus=1).remote() for _ in range(followers)]
    ray.get([actor.take.remote(b"") for actor in actors])

    def send(frame: bytes) -> None:
        for actor in actors:
            actor.take.remote(frame)

    yield send
    ray.shutdown()


async def print_table(followers: int, rows: list[int], with_ray: bool) -> None:
    """Measure, and print a line for each number of rows and way to send."""
    ways = {"socket pairs": by_pairs, "TCP": by_tcp}
    if with_ray:
        ways["Ray actors"] = by_ray
    print("rows  way               plan     send    later   yardstick   (plan + send) / yardstick")
    for name, way in ways.items():
        async with way(followers) as send:
            for count in rows:
                times = await measured(send, count)
                values = "".join(f"{value:>9.1f}" for value in times[:3])
                ratio = (times.plan + times.send) / times.yardstick
                print(f"{count:>4}  {name:<12}{values}  {times.yardstick:>10.1f}{ratio:>28.2f}")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--followers", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--ray", action="store_true", help="also by calls of Ray's actors")
    args = parser.parse_args()
    asyncio.run(print_table(args.followers, args.rows, args.ray))


if __name__ == "__main__":
    main()
