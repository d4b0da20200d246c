"""The count of the host's work runs, and its largest pieces stay as small as they have become."""

from __future__ import annotations

from types import ModuleType

import pytest
from programs import benchmark

CALLS_PER_TOKEN = 84
"""Of the event loop, all work for requests included, 2.7 of which begin in a step: 79, once 92."""
NUMBERS_PER_ROW = 10
"""3, once 42: all top tokens of all rows became objects of Python."""


@pytest.fixture
def host_work() -> ModuleType:
    return benchmark("host_work")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["calls", "numbers"])
async def test_a_step_in_traffic_costs_no_more_than_it_did(
    host_work: ModuleType, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, threads = await host_work.count_work(40, 60, host_work.KINDS[kind])
    host_work.report(steps, threads, kind, 5)
    assert f"{kind} per step" in capsys.readouterr().out
    totals = {name: sum(counts.by_code.values()) for name, counts in threads.items()}
    assert steps.totals["rows"] > 200 * steps.totals["steps"]
    if kind == "calls":
        assert all(totals.values())
        assert totals["loop"] / steps.totals["tokens"] < CALLS_PER_TOKEN
    else:
        assert 1 < totals["completion"] / steps.totals["rows"] < NUMBERS_PER_ROW


@pytest.mark.slow
async def test_launches_are_timed_without_and_with_new_blocks(host_work: ModuleType) -> None:
    times = await host_work.launch_times((1, 20), 40)
    assert [rows for rows, *_ in times] == [1, 20]
    assert all(each > 0 for _, *both in times for each in both)
