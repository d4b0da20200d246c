"""How samples of a thread's waits become launches; and what a thread tells the system."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
from programs import benchmark

from jackfield.core.worker.threads import COMPLETION_THREAD, TIMER_SLACK_NS, settle_in

LOCK, QUEUE, RUNNING = 0x1008, 0x9000, 0


@pytest.fixture(scope="module")
def lock_waits() -> ModuleType:
    return benchmark("lock_waits")


def test_launches_lie_between_waits_for_work(lock_waits: ModuleType) -> None:
    words = [QUEUE, QUEUE, RUNNING, LOCK, LOCK, RUNNING, LOCK, QUEUE, QUEUE, RUNNING, RUNNING]
    words += [QUEUE, RUNNING]  # The last launch has not ended.
    samples = [lock_waits.Sample(i / 1000, word) for i, word in enumerate(words)]
    launches = lock_waits.find_launches(samples, [range(0x1000, 0x2000)])
    rounded = [(round(x.seconds, 6), round(x.lock_seconds, 6), x.num_waits) for x in launches]
    assert rounded == [(0.005, 0.003, 2), (0.002, 0.0, 0)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thread_tells_its_name_and_wakes_on_time() -> None:
    seen = []

    def look() -> None:
        settle_in(COMPLETION_THREAD)
        number = threading.get_native_id()
        seen.append(Path(f"/proc/self/task/{number}/comm").read_text().strip())
        seen.append(Path(f"/proc/{number}/timerslack_ns").read_text().strip())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [COMPLETION_THREAD, str(TIMER_SLACK_NS)]
