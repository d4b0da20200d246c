"""Frames between rank 0 and a follower: in order and whole, however slowly they are read."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from typing import Any

import pytest

from jackfield.core.errors import ConfigError, OutOfMemory
from jackfield.core.parts.kv_transfer import KVDetached, KVReport, TransferPlan, TransferResult
from jackfield.core.remote.frames import FrameReader, encode
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.step import (
    PrepareAhead,
    SlotStart,
    StepPlan,
    StepResult,
    TableWrite,
)
from jackfield.core.worker.threads import WorkerThread
from jackfield.plugins.executors import followers
from jackfield.plugins.executors.followers import FollowerProcess
from jackfield.plugins.executors.leader_end import end_thread
from jackfield.plugins.executors.messages import (
    Done,
    Failed,
    Inbox,
    Job,
    Log,
    PlanRows,
    Step,
    ToFollower,
)
from jackfield.plugins.executors.progress import Progress
from jackfield.plugins.executors.spawn import SpareProcess
from jackfield.plugins.executors.transfers import RankTransfers


class Gone:
    """A process that has ended."""

    status = -9

    def poll(self) -> int:
        return self.status

    def kill(self) -> None:
        raise ProcessLookupError


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """The follower's end of the connection."""
    own, other = socket.socketpair()
    process: Any = Gone()
    monkeypatch.setattr(
        followers, "take", lambda: SpareProcess(process, own, Progress.create(), ())
    )
    return other


def plan(number: int, num_tokens: int) -> StepPlan:
    tokens = tuple(range(number, number + num_tokens))
    start = SlotStart(0, f"r{number}", tokens, num_tokens, 0, SamplingParams(), 0)
    return StepPlan(number, (0,), (num_tokens,), (True,), starts=(start,))


def test_rows_that_repeat_are_sent_once() -> None:
    """Whatever changes between plans, the other side has all of each."""
    rows = {"slots": (3, 4, 9), "num_tokens": (1, 1, 1), "samples": (True, True, True)}
    write = TableWrite(4, 0, 7, (12,))
    plans = [
        StepPlan(1, **rows),
        StepPlan(2, **rows, table_writes=(write,)),
        StepPlan(3, **{**rows, "slots": (3, 4, 8)}),
        StepPlan(4, (), (), (), released=(3,)),
        StepPlan(5, **rows),
        StepPlan(6, **rows, parts={"kv_transfer": TransferPlan(b"more")}),
    ]
    own, other = PlanRows(), PlanRows()
    reader: FrameReader[ToFollower] = FrameReader(ToFollower)
    frames = [own.encode_step(step.step, step) for step in plans]
    messages = [message for frame in frames for message in reader.read_frames(frame)]
    steps = [message for message in messages if isinstance(message, Step)]
    assert [other.plan_of(step) for step in steps] == plans
    assert [step.repeats_rows for step in steps] == [False, True, False, False, False, True]


async def test_frames_arrive_whole_and_in_order(other: socket.socket) -> None:
    """More than a socket takes at once, before the other side reads the first byte."""
    sent = [Step(number, plan(number, 90_000)) for number in range(1, 6)]
    sent += [Job(6, PrepareAhead())]  # type: ignore[list-item]
    received: list[Any] = []
    follower = FollowerProcess(1, received=lambda *_: None, lost=lambda *_: None)
    for message in sent:
        follower.send(encode(message))

    def read() -> None:
        inbox: Inbox[ToFollower] = Inbox(other, ToFollower)
        received.extend(inbox.take() for _ in sent)

    await asyncio.to_thread(read)
    assert received == sent
    await follower.close(0)
    other.close()


async def test_replies_logs_and_the_end(
    other: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    received: list[Any] = []
    lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    follower = FollowerProcess(
        3,
        received=lambda rank, message: received.append((rank, message)),
        lost=lambda rank, ending: lost.set_result((rank, ending)),
    )
    log = Log(logging.WARNING, "jackfield.worker", "no luck")
    frames = b"".join(encode(message) for message in (Done(4), log, Done(5)))
    for part in (frames[:7], frames[7:40], frames[40:]):
        await asyncio.to_thread(other.sendall, part)
        await asyncio.sleep(0)
    other.close()
    rank, ending = await lost
    assert received == [(3, Done(4)), (3, Done(5))]
    assert "rank 3: no luck" in caplog.text
    assert rank == 3 and "SIGKILL" in ending
    await follower.close(0)


def test_errors_keep_their_class_and_field() -> None:
    error = Failed.from_error(2, ConfigError("block_size: too small", param="block_size")).error(
        "rank 1"
    )
    assert isinstance(error, ConfigError) and error.param == "block_size"
    assert str(error) == "rank 1: block_size: too small"
    assert isinstance(Failed.from_error(2, OutOfMemory("no room")).error("rank 1"), OutOfMemory)
    other = Failed.from_error(2, ZeroDivisionError("by zero")).error("rank 1")
    assert str(other) == "rank 1: ZeroDivisionError: by zero"


def test_an_inbox_ends_with_its_connection() -> None:
    own, other = socket.socketpair()
    inbox: Inbox[ToFollower] = Inbox(own, ToFollower)
    thread = threading.Thread(target=other.close)
    thread.start()
    assert inbox.take() is None
    thread.join()
    own.close()


def into(transfers: RankTransfers, step: int, own: KVReport | None) -> KVReport | None:
    """The report of all ranks in rank 0's result."""
    result = StepResult(
        step, [], [], parts={} if own is None else {"kv_transfer": TransferResult(own)}
    )
    sent = transfers.into(result).parts.get("kv_transfer")
    return None if sent is None else sent.report


def test_a_transfer_ends_once_it_has_on_all_ranks() -> None:
    """With the blocks that any rank did not fill."""
    news: list[int] = []
    failures: list[str] = []
    transfers = RankTransfers(3, lambda: news.append(1), failures.append)
    done = KVReport(finished=(1, 2))
    transfers.take(1, done, None)
    assert into(transfers, 0, done) is None and not news
    transfers.take(2, KVReport(finished=(1,), failed={2: (7, 5)}), None)
    transfers.take(1, KVReport(failed={3: (9,)}), None)
    assert len(news) == 1
    own = KVReport(failed={3: (8,)}, payload=b"own")
    assert into(transfers, 1, own) == KVReport((1,), {2: (5, 7)}, b"own")
    transfers.take(2, KVReport(finished=(3,)), KVDetached("mine failed"))
    sent = transfers.into(StepResult(2, [], [])).parts["kv_transfer"]
    assert sent.report == KVReport(failed={3: (8, 9)}) and len(news) == 2
    assert sent.detached == KVDetached("rank 2: mine failed", closed=None)
    assert into(transfers, 3, None) is None
    assert transfers.into(StepResult(4, [], [])).parts["kv_transfer"].detached == sent.detached
    assert failures == ["rank 2: mine failed"]


@pytest.mark.parametrize("unnamed", [0, 1])
def test_a_transfer_that_failed_without_blocks_on_one_rank_has_failed_whole(unnamed: int) -> None:
    transfers = RankTransfers(2, lambda: None, lambda _: None)
    reports = [KVReport(failed={1: (), 2: ()}), KVReport(finished=(1,), failed={2: (7,)})]
    if unnamed:
        reports.reverse()
    transfers.take(1, reports[1], None)
    assert into(transfers, 0, reports[0]) == KVReport(failed={1: (), 2: ()})


@pytest.mark.parametrize("last", [True, False])
def test_no_block_is_used_once_the_halves_of_all_ranks_have_closed(last: bool) -> None:
    failures: list[str] = []
    transfers = RankTransfers(2, lambda: None, failures.append)
    own = StepResult(
        0, [], [], parts={"kv_transfer": TransferResult(detached=KVDetached("mine failed"))}
    )
    assert transfers.into(own).parts["kv_transfer"].detached == KVDetached("rank 0: mine failed")
    transfers.take(1, None, KVDetached("rank 0: mine failed"))
    transfers.take(1, None, KVDetached("rank 0: mine failed", closed=True))
    assert transfers.into(own).parts["kv_transfer"].detached == KVDetached("rank 0: mine failed")
    own = StepResult(
        1,
        [],
        [],
        parts={"kv_transfer": TransferResult(detached=KVDetached("mine failed", closed=last))},
    )
    assert transfers.into(own).parts["kv_transfer"].detached == KVDetached(
        "rank 0: mine failed", closed=last
    )
    assert failures == ["rank 0: mine failed"]


async def test_a_process_that_cannot_be_killed_is_left_alone(
    other: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver may hold it up for ever: the engine ends nevertheless."""
    monkeypatch.setattr(Gone, "status", None)
    monkeypatch.setattr(FollowerProcess, "kill_seconds", 0.05)
    follower = FollowerProcess(1, received=lambda *_: None, lost=lambda *_: None)
    await asyncio.wait_for(follower.close(0.0), 120)
    assert "rank 1 was killed, and is still there" in caplog.text


async def test_rank_0_ends_where_leaving_the_others_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has ended the call that the launch thread was in nevertheless."""
    loop = asyncio.get_running_loop()
    thread, called = WorkerThread(loop), threading.Event()

    class Joined:
        def leave(self) -> None:
            called.set()
            raise RuntimeError("a connection is gone")

    ended: asyncio.Future[Any] = thread.call(called.wait)
    joined: Any = Joined()
    await asyncio.wait_for(end_thread(thread, ended, joined, 0.01), 120)
    assert ended.done() and not any(each.is_alive() for each in thread._threads)
    assert "a connection is gone" in caplog.text and "for ever" not in caplog.text
