"""`CollectivesKit`: whether collectives add and join what ranks have.

    class TestMine(CollectivesKit):
        name = "mine"                               # as registered

Ranks are threads of this process, on devices that the collectives support: a CPU, or several GPUs.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch

from ...core.errors import ConfigError
from ...core.parallel.join import listen
from ...core.protocols.collectives import CollectivesSetup
from .kit import Kit
from .rank_threads import run_ranks

PATIENCE = 0.2
"""Seconds for which what must not happen is waited for."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)


class GroupKit(Kit):
    """What kits of groups of ranks share."""

    seconds: ClassVar[float] = 30.0
    """Longest wait for the other ranks."""

    def devices(self, size: int) -> list[torch.device]:
        """Return a device for each of `size` ranks; skips the test if there are none."""
        reason = self.registered().supports(torch.device("cpu"))
        assert reason is None or isinstance(reason, str), f"supports() gives {reason!r}"
        if reason is None:
            return [torch.device("cpu")] * size
        if torch.cuda.device_count() < size:
            pytest.skip(f"not on a CPU ({reason}), and there are not {size} GPUs")
        return [torch.device("cuda", rank) for rank in range(size)]

    def together(self, size: int, run: Callable[[int, Any], Any]) -> list[Any]:
        """Return what `run`, which closes it, returns on each rank, given its end of a group."""
        devices, listener = self.devices(size), listen()
        address = listener.getsockname()[:2]

        def join(rank: int) -> Any:
            setup = self.setup(
                rank=rank, size=size, address=address, listener=None if rank else listener,
                device=devices[rank], timeout=self.seconds,
            )  # fmt: skip
            return run(rank, self.registered()(setup))

        return run_ranks([functools.partial(join, rank) for rank in range(size)])

    def exchange(self, size: int, work: Callable[[Any, torch.device], Any]) -> list[Any]:
        """Return what `work` returns on each rank, given its end of the group and its device."""
        devices, together = self.devices(size), threading.Barrier(size)

        def run(rank: int, group: Any) -> Any:
            try:
                assert (group.rank, group.size) == (rank, size)
                with torch.inference_mode():  # As the engine's calls, and only in this thread.
                    result = work(group, devices[rank])
                result = result.cpu() if isinstance(result, torch.Tensor) else result
                together.wait(self.seconds)
                return result
            except BaseException:
                together.abort()
                raise
            finally:
                group.close()

        return self.together(size, run)

    def setup(self, **facts: Any) -> CollectivesSetup:
        """Return what a rank is made from."""
        return CollectivesSetup(**facts)

    def test_a_group_that_nobody_leads_is_refused_in_time(self) -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            setup = self.setup(
                rank=1, size=2, address=silent.getsockname(), listener=None,
                device=self.devices(2)[1], timeout=0.3,
            )  # fmt: skip
            with pytest.raises(ConfigError) as caught:
                self.registered()(setup)
        assert caught.value.param == "tensor_parallel_size"


def connect(group: Any, device: torch.device, links: Sequence[tuple[int, int]]) -> None:
    """Send something from rank to rank for the first time, which may wait for the other side: all
    ranks go through the links in one order."""
    for source, target in links:
        number = torch.zeros(1, device=device)
        if group.rank == source:
            group.send(number, target)
        elif group.rank == target:
            group.receive(number, source).wait()


class CollectivesKit(GroupKit):
    """Subclass it, and set the name."""

    kind = "collectives"

    @pytest.mark.parametrize("size", [2, 3])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_sums_are_the_same_bits_on_each_rank(self, dtype: torch.dtype, size: int) -> None:
        draw = torch.Generator().manual_seed(3)
        terms = (10 * torch.randn(size, 7, 33, generator=draw)).to(dtype)

        def add(group: Any, device: torch.device) -> torch.Tensor:
            total: torch.Tensor = group.all_reduce(terms[group.rank].to(device, copy=True))
            return total

        first, *others = self.exchange(size, add)
        assert all(torch.equal(total, first) for total in others)
        assert first.dtype == dtype
        bound = 0.0 if not dtype.is_floating_point else 100 * torch.finfo(dtype).eps
        torch.testing.assert_close(first.double(), terms.double().sum(0), atol=bound, rtol=0)

    @pytest.mark.parametrize("rows", [0, 1, 5, 64, 700])
    def test_a_residual_is_added_once(self, rows: int) -> None:
        """Terms of few bytes and of many, which may take unlike ways, one after another."""
        draw = torch.Generator().manual_seed(11)
        terms = torch.randn(2, rows, 520, generator=draw)
        residual = torch.randn(rows, 520, generator=draw)
        want = residual.double() + terms.double().sum(0)

        def add(group: Any, device: torch.device) -> torch.Tensor:
            addend = residual.to(device, copy=True)
            for _ in range(3):
                group.all_reduce(terms[group.rank].to(device, copy=True))
            total: torch.Tensor = group.all_reduce(terms[group.rank].to(device, copy=True), addend)
            return total

        first, *others = self.exchange(2, add)
        assert all(torch.equal(total, first) for total in others)
        torch.testing.assert_close(first.double(), want, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (3, 0)], ids=str)
    def test_parts_are_joined_in_the_last_dimension_by_rank(self, shape: tuple[int, ...]) -> None:
        draw = torch.Generator().manual_seed(5)
        parts = torch.randn(2, *shape, generator=draw)
        want = torch.cat(list(parts), dim=-1)
        for got in self.exchange(2, lambda group, on: group.all_gather(parts[group.rank].to(on))):
            assert torch.equal(got, want)

    def test_many_calls_stay_in_order(self) -> None:
        """One after another without waiting, of unlike sizes, and what is given to a join stays."""

        def work(group: Any, device: torch.device) -> torch.Tensor:
            values = []
            for number in range(1, 60):
                x = torch.full((number % 7 + 1,), float(number), device=device)
                values.append(group.all_gather(x)[-1:])
                values.append(group.all_reduce(x)[:1])
            return torch.cat(values)

        want = torch.tensor([[n, 2.0 * n] for n in range(1, 60)]).flatten()
        assert all(torch.equal(got, want) for got in self.exchange(2, work))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(1,), (3, 4), (700, 520)], ids=str)
    def test_what_is_sent_arrives(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        sent = (10 * torch.randn(shape, generator=torch.Generator().manual_seed(3))).to(dtype)

        def work(group: Any, device: torch.device) -> Any:
            if group.rank == 0:
                group.send(sent.to(device), 1)
                return sent
            into = torch.zeros(shape, dtype=dtype, device=device)
            group.receive(into, 0).wait()
            return into

        assert all(torch.equal(got, sent) for got in self.exchange(2, work))

    def test_what_is_sent_stays_in_order_and_as_it_was(self) -> None:
        """Around a ring of three. What was sent is overwritten, and what is received is waited for
        when all is on its way."""

        def work(group: Any, device: torch.device) -> list[int]:
            after, before = (group.rank + 1) % 3, (group.rank + 2) % 3
            connect(group, device, ((0, 1), (1, 2), (2, 0)))
            number = torch.zeros(2, dtype=torch.int64, device=device)
            arriving = []
            for count in range(40):
                number.fill_(100 * group.rank + count)
                group.send(number, after)
                into = torch.zeros_like(number)
                arriving.append((into, group.receive(into, before)))
            got = []
            for into, transfer in arriving:
                transfer.wait()
                got += into.tolist()
            return got

        for rank, got in enumerate(self.exchange(3, work)):
            first = 100 * ((rank + 2) % 3)
            assert got == [first + count for count in range(40) for _ in range(2)]

    def test_a_rank_need_not_wait_for_what_is_on_its_way(self) -> None:
        """Each receives before it sends, and all ranks add up meanwhile."""

        def work(group: Any, device: torch.device) -> float:
            connect(group, device, ((0, 1), (1, 0)))
            into = torch.zeros(3, device=device)
            other = 1 - group.rank
            transfer = group.receive(into, other)
            total = group.all_reduce(torch.ones(3, device=device))
            group.send(total * (group.rank + 1), other)
            transfer.wait()
            return float(into.sum())

        assert self.exchange(2, work) == [12.0, 6.0]

    def test_what_was_sent_may_be_overwritten_before_it_is_received(self) -> None:
        """More than a connection holds, and the other side begins to receive when it is gone."""
        gone = threading.Event()

        def work(group: Any, device: torch.device) -> Any:
            connect(group, device, ((0, 1),))
            x = torch.full((1 << 21,), 3.0 * (1 - group.rank), device=device)
            if group.rank == 0:
                group.send(x, 1)
                x.fill_(-1.0)
                gone.set()
                return True
            # A send that waits for the other side would be released when this wait has ended.
            assert gone.wait(self.seconds / 2), "send waits for the other rank"
            group.receive(x, 0).wait()
            return bool((x == 3.0).all())

        assert self.exchange(2, work) == [True, True]

    def test_what_is_received_is_there_after_the_wait(self) -> None:
        """And not before it was sent: the wait really waits, also in another thread than the one
        that asked for it."""
        waiting, waited = threading.Event(), threading.Event()

        def work(group: Any, device: torch.device) -> Any:
            connect(group, device, ((0, 1),))
            x = torch.full((3, 5), 7.0 * (1 - group.rank), device=device)
            if group.rank == 0:
                assert waiting.wait(self.seconds)
                # On a device with streams the host goes on.
                assert device.type != "cpu" or not waited.wait(PATIENCE), "wait does not wait"
                group.send(x, 1)
                return True
            transfer = group.receive(x, 0)
            assert not x.any(), "it is filled before anything was sent"
            waiting.set()
            transfer.wait()
            got = x.clone()
            waited.set()
            return bool((got == 7.0).all())

        assert self.exchange(2, work) == [True, True]

    def test_a_rank_may_leave_before_the_others(self) -> None:
        """`close` waits for no other rank, which still uses its end or is gone."""
        for first in (0, 1):
            left = threading.Event()

            def leave(rank: int, group: Any, first: int = first, left: Any = left) -> None:
                if rank != first:
                    assert left.wait(self.seconds / 2), "close waits for the other rank"
                group.close()
                left.set()

            self.together(2, leave)

    def test_two_groups_of_one_process_do_not_meet(self) -> None:
        ended = threading.Event()

        def work(group: Any, device: torch.device) -> float:
            first = float(group.all_reduce(torch.ones(1, device=device)))
            if group.rank == 0:
                inner = self.exchange(
                    2, lambda other, on: float(other.all_reduce(torch.full((1,), 5.0, device=on)))
                )
                assert inner == [10.0, 10.0]
                ended.set()
            else:
                # A call that waits on a GPU would hold up those of the other group.
                assert ended.wait(self.seconds)
            return first + float(group.all_reduce(torch.ones(1, device=device)))

        assert self.exchange(2, work) == [4.0, 4.0]

    def test_the_environment_configures_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Variables of torch's launchers may be there for something else."""
        for name, value in (("RANK", "7"), ("WORLD_SIZE", "9"), ("MASTER_PORT", "1")):
            monkeypatch.setenv(name, value)
        ranks = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
        self.test_two_groups_of_one_process_do_not_meet()
        assert ranks == {name: os.environ[name] for name in ranks}
