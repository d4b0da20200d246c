"""Microseconds that rank 0's event loop gives to send one step's plan to the other ranks.

    python examples/benchmarks/plan_transport.py --followers 3

By the connections of the executor `ray` (TCP), which encode a plan once, and by calls of Ray's
actors with the same bytes. The other side only reads. All processes are on this host: the network
is not in the numbers. The median of all steps; needs `jackfield[ray]`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable

import msgspec

from jackfield.core.parallel.join import listen
from jackfield.core.remote.frames import encode
from jackfield.core.step import StepPlan
from jackfield.plugins.executors.messages import Step
from jackfield.plugins.executors.ray.connections import Reception

STEPS = 500
PAUSE_SECONDS = 0.002
"""Between steps, in which the others read: as long as a short step."""
READER = """
import sys
from jackfield.plugins.executors.ray.connections import connect
connection = connect(("127.0.0.1", int(sys.argv[1])), bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
while connection.recv(1 << 16):
    pass
"""


def plan(rows: int) -> StepPlan:
    """Return the plan of a decode step."""
    slots = tuple(range(rows))
    return StepPlan(step=1, slots=slots, num_tokens=(1,) * rows, samples=(True,) * rows)


async def measured(send: Callable[[StepPlan], object], rows: int) -> float:
    """Return the median of microseconds of a call."""
    times = []
    step_plan = plan(rows)
    for _ in range(STEPS):
        began = time.perf_counter()
        send(step_plan)
        times.append(1e6 * (time.perf_counter() - began))
        await asyncio.sleep(PAUSE_SECONDS)
    return statistics.median(times[STEPS // 10 :])


async def by_tcp(followers: int, rows: list[int]) -> list[float]:
    """Encode once, write to each socket."""
    reception = Reception(listen(), range(1, followers + 1))
    greeting = [str(reception.address[1]), reception.secret.hex()]
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", READER, *greeting, str(rank))
        for rank in reception.connections
    ]
    await asyncio.gather(*reception.connections.values())
    sockets = [reception.take(rank) for rank in range(1, followers + 1)]

    def send(step_plan: StepPlan) -> None:
        frame = encode(Step(1, step_plan))
        for each in sockets:
            assert each.send(frame) == len(frame)

    results = [await measured(send, each) for each in rows]
    for each in sockets:
        each.close()
    for process in processes:
        await process.wait()
    await reception.close()
    return results


async def by_ray(followers: int, rows: list[int]) -> list[float]:
    """Encode once, call a method of each actor."""
    import ray

    class Reader:
        def take(self, frame: bytes) -> None:
            pass

    ray.init(address="local", num_cpus=followers, include_dashboard=False, logging_level="error")
    actors = [ray.remote(Reader).options(num_cpus=1).remote() for _ in range(followers)]
    ray.get([actor.take.remote(b"") for actor in actors])

    def send(step_plan: StepPlan) -> None:
        frame = msgspec.msgpack.encode(Step(1, step_plan))
        for actor in actors:
            actor.take.remote(frame)

    results = [await measured(send, each) for each in rows]
    ray.shutdown()
    return results


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--followers", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    args = parser.parse_args()
    columns = {
        "TCP": asyncio.run(by_tcp(args.followers, args.rows)),
        "Ray actors": asyncio.run(by_ray(args.followers, args.rows)),
    }
    print("rows  bytes  " + "  ".join(f"{name:>10}" for name in columns))
    for index, rows in enumerate(args.rows):
        size = len(encode(Step(1, plan(rows))))
        values = "  ".join(f"{column[index]:>10.1f}" for column in columns.values())
        print(f"{rows:>4}  {size:>5}  {values}")


if __name__ == "__main__":
    main()
