"""Ranks choose the tokens of plain rows from their own logits, as one chooses from all."""

from __future__ import annotations

import functools
import importlib.util
import threading
from typing import Any

import pytest
import torch

from jackfield.core.nn.context import BuildContext
from jackfield.core.nn.embedding import Embedding
from jackfield.core.nn.operations import Operations
from jackfield.core.parallel.ranks import ONE_RANK, Ranks
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.step import SlotStart
from jackfield.core.worker.sampling.sampler import Sampler
from jackfield.core.worker.sampling.sampling_state import SamplingState
from jackfield.plugins.conformance.rank_threads import run_ranks, thread_ranks

from helpers import interpreted

TEMPERATURES = (0.0, 0.7, 1.5, 0.0, 1.0)
LENGTH = 3


def operations(name: str) -> Operations:
    if name == "torch":
        return Operations()
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    from jackfield.plugins.operations.triton import TritonOperations

    made = TritonOperations()
    for method in ("sample", "sample_parts", "sample_best"):
        setattr(made, method, functools.partial(one_at_a_time, getattr(made, method)))
    return made


INTERPRETER = threading.Lock()


def one_at_a_time(function: Any, *args: Any, **options: Any) -> Any:
    """Triton's interpreter has one state for all threads."""
    with INTERPRETER:
        return function(*args, **options)


class Rank:
    """A head and the sampler behind it."""

    def __init__(self, name: str, ranks: Ranks, table: torch.Tensor) -> None:
        build = BuildContext(torch.device("cpu"), torch.float32, operations(name), ranks=ranks)
        self.head = Embedding(*table.shape, build, shard="vocabulary")
        self.head.requires_grad_(False)
        sharding = self.head.shardings.get("weight")
        self.head.weight.copy_(sharding.part(None, table) if sharding else table)
        self.history = torch.zeros((len(TEMPERATURES) + 1, 9), dtype=torch.int32)
        state = SamplingState(
            len(self.history), len(table), torch.device("cpu"), self.history,
            kernels=build.operations.samples,
        )  # fmt: skip
        self.sampler = Sampler(state, operations=build.operations)
        self.sampler.divide(self.head, ranks)
        for slot, temperature in enumerate(TEMPERATURES):
            params = SamplingParams(temperature=temperature)
            state.start(
                SlotStart(
                    slot=slot, request_id=str(slot), token_ids=(1,) * LENGTH, num_prompt_tokens=1,
                    num_computed_tokens=0, params=params, seed=slot,
                )
            )  # fmt: skip
        state.upload()

    def choose(self, hidden: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        rows = len(hidden)
        out, shard = self.sampler.outputs.first(rows), self.sampler.shard
        logits = shard.logits(self.head.logits, hidden) if shard else self.head.logits(hidden)
        slots, lengths = torch.arange(rows), torch.full((rows,), LENGTH)
        (shard or self.sampler).sample_plain(logits, slots, lengths, out)
        return out.chosen.tolist(), self.history


def both(name: str, size: int, table: torch.Tensor, hidden: torch.Tensor) -> list[Any]:
    """One rank's tokens and history, then those of each of several."""
    several = [Rank(name, ranks, table) for ranks in thread_ranks(size)]
    assert all(rank.sampler.shard is not None for rank in several)
    alone = Rank(name, ONE_RANK, table)
    assert alone.sampler.shard is None
    return [
        alone.choose(hidden),
        *run_ranks([functools.partial(rank.choose, hidden) for rank in several]),
    ]


@pytest.mark.parametrize(("vocab", "size"), [(9, 4), (7, 2), (4500, 2), (5, 4)])
@pytest.mark.parametrize("name", ["torch", pytest.param("triton", marks=interpreted)])
def test_the_choice_is_that_of_the_whole_vocabulary(name: str, vocab: int, size: int) -> None:
    """With NaN in one rank's logits, and with ranks that have no token."""
    draw = torch.Generator().manual_seed(vocab)
    table = torch.randn(vocab, 8, generator=draw)
    hidden = torch.randn(len(TEMPERATURES), 8, generator=draw)
    hidden[3] = float("nan")
    (want, history), *several = both(name, size, table, hidden)
    assert want[3] == -1 and len(set(want)) > 2
    for got, written in several:
        assert got == want and torch.equal(written, history)


@pytest.mark.parametrize("name", ["torch", pytest.param("triton", marks=interpreted)])
def test_of_equal_logits_the_first_token_wins(name: str) -> None:
    table = torch.zeros(10, 2)
    table[[3, 4, 7], 0] = 1.0
    for got, _ in both(name, 2, table, torch.tensor([[1.0, 0.0]])):
        assert got == [3]
    table[3] = 0.0
    table[4] = float("nan")
    for got, _ in both(name, 2, table, torch.tensor([[1.0, 0.0]])):
        assert got == [-1]


def test_a_few_bytes_are_exchanged_for_a_row() -> None:
    sent = []

    class Counting:
        def __init__(self, group: Any) -> None:
            self.rank, self.size, self._group = group.rank, group.size, group

        def all_gather(self, x: torch.Tensor) -> torch.Tensor:
            sent.append(x.nbytes)
            joined: torch.Tensor = self._group.all_gather(x)
            return joined

    ranks: list[Any] = [Ranks(tensor=Counting(each.tensor)) for each in thread_ranks(2)]  # type: ignore
    several = [Rank("torch", each, torch.randn(400, 4)) for each in ranks]
    run_ranks([functools.partial(rank.choose, torch.randn(5, 4)) for rank in several])
    assert sent == [5 * 8] * 2


def test_heads_gather_again_once_logits_are_computed_or_have_failed() -> None:
    """Log-probabilities and constrained rows need the whole vocabulary's."""
    rank = Rank("torch", thread_ranks(2)[0], torch.randn(8, 4))
    shard = rank.sampler.shard
    assert shard is not None

    def fails(hidden: Any) -> torch.Tensor:
        assert not rank.head.gathers
        raise RuntimeError("out of memory")

    assert shard.logits(rank.head.logits, torch.randn(2, 4)).shape == (2, 4)
    assert rank.head.gathers
    with pytest.raises(RuntimeError):
        shard.logits(fails, torch.randn(2, 4))
    assert rank.head.gathers
