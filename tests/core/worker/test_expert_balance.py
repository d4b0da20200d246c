"""Experts that move between ranks: who holds what, that weights arrive whole, and that an engine
serves the same tokens meanwhile."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_moves import check_moves, tokens_of_requests, two_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from jackfield import EngineConfig
from jackfield.core.engine.step_loop import BalanceTimes
from jackfield.core.errors import ConfigError
from jackfield.core.nn.expert_balance.placement import balanced, rank_loads
from jackfield.core.nn.expert_balance.places import ExpertBalance
from jackfield.core.nn.experts import Experts
from jackfield.core.nn.routing import Routing
from jackfield.core.parallel.expert_share import ExpertShare
from jackfield.core.parallel.ranks import Group
from jackfield.core.step import BalanceExperts
from jackfield.core.worker.expert_balance import ExpertMover
from jackfield.plugins.conformance.paged_model import PagedModel
from jackfield.plugins.conformance.rank_threads import run_ranks, thread_ranks

from helpers import make_checkpoint

CPU = torch.device("cpu")


# ---------------------------------------------------------------- placement


def test_the_busiest_expert_gets_the_copy() -> None:
    """By hand: expert 2 has 60 of 100 tokens; its two copies are on the two ranks."""
    placement = balanced(((0, 1, 2), (3, 4, 0)), [10, 10, 60, 10, 10])
    assert sorted(expert for rank in placement for expert in rank) == [0, 1, 2, 2, 3, 4]
    assert all(2 in rank for rank in placement)
    assert rank_loads(placement, [10, 10, 60, 10, 10]) == [50.0, 50.0]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_expert_has_a_place_and_no_rank_has_one_twice(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(2, 5))
    places = data.draw(st.integers(1, 6))
    num_experts = data.draw(st.integers(max(places, num_ranks), num_ranks * places))
    numbers = [place % num_experts for place in range(num_ranks * places)]
    old = tuple(tuple(numbers[rank * places :][:places]) for rank in range(num_ranks))
    loads = data.draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts))
    new = balanced(old, loads)
    assert {expert for rank in new for expert in rank} == set(range(num_experts))
    assert all(len(rank) == places == len(set(rank)) for rank in new)
    assert sum(rank_loads(new, loads)) == pytest.approx(sum(loads))
    for before, after in zip(old, new, strict=True):
        stay = set(before) & set(after)
        assert all(after[before.index(expert)] == expert for expert in stay), "moved in its rank"
    assert balanced(new, loads) == new, "the same tokens move nothing more"


def test_busy_experts_are_on_different_ranks() -> None:
    placed = balanced(((0, 2), (1, 3)), [50, 1, 50, 1])
    assert rank_loads(placed, [50, 1, 50, 1]) == [51, 51]


def test_copies_take_turns_and_every_choice_is_computed_once() -> None:
    routing = Routing(torch.ones(40, 2), torch.tensor([[0, 3]] * 40, dtype=torch.int32))
    groups = [ranks.tensor for ranks in thread_ranks(2)]
    computed = []
    for group in groups:
        share = ExpertShare.of(4, group, 2)
        balance = ExpertBalance(share, 2, group, CPU)
        assert share.own == balance.placement[group.rank] == ((0, 1, 2), (3, 0, 1))[group.rank]
        places = balance.place(routing).experts
        assert balance.loads.tolist() == [40, 0, 0, 40]
        own = (places >= 0) & (places < 3)
        expected = torch.tensor([[0, 3]] * 40)
        assert torch.equal(torch.tensor(share.own)[places[own]], expected[own])
        computed.append(own)
    assert torch.equal(computed[0].int() + computed[1].int(), torch.ones(40, 2).int())
    assert [int(own[:, 0].sum()) for own in computed] == [20, 20], "of expert 0, which both have"


@pytest.mark.parametrize(
    ("num_experts", "copies", "reason"),
    [(7, 2, "a multiple of 2"), (7, 0, "a multiple of 2"), (4, 8, "at most 4 do")],
)
def test_copies_that_ranks_have_no_places_for_are_refused(
    num_experts: int, copies: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        ExpertShare.of(num_experts, thread_ranks(2)[0].tensor, copies)
    assert caught.value.param == "eplb_config"


# ---------------------------------------------------------------- moving


def test_ranks_that_store_experts_unalike_are_refused() -> None:
    """A format may leave out what is trivial on one rank."""
    groups = [ranks.tensor for ranks in thread_ranks(2)]

    def move(group: Group, types: list[torch.dtype]) -> None:
        model = torch.nn.Module()
        mover = ExpertMover(model, group, CPU)
        mover.layers = [(None, [torch.zeros(2, 3, dtype=kind) for kind in types])]  # type: ignore[list-item]
        mover._check_alike()

    half = [torch.float16, torch.float16]
    run_ranks([functools.partial(move, group, half) for group in groups])
    kinds = (half, [torch.float16, torch.float32])
    for more in (kinds, kinds[::-1]):
        with pytest.raises(ConfigError, match="unlike tensors") as caught:
            run_ranks([functools.partial(move, *each) for each in zip(groups, more, strict=True)])
        assert caught.value.param == "enable_eplb"


@pytest.mark.parametrize("copies", [0, 2])
def test_moved_experts_compute_the_same(copies: int, tmp_path: Path) -> None:
    """With biases, and stacked in one tensor."""
    check_moves(make_checkpoint("gpt-oss", tmp_path), copies)


@pytest.mark.parametrize(("busiest", "moves"), [(20, True), (100, False)])
def test_experts_stay_where_moving_them_would_gain_little(
    busiest: int, moves: bool, tmp_path: Path
) -> None:
    """By hand: two experts of the busiest one's rank change places, which gains 2 of 24 or 104."""
    _, movers = two_ranks(make_checkpoint("gpt-oss", tmp_path), 0)
    for mover in movers:
        for balance, _ in mover.layers:
            assert [len(own) for own in balance.placement] == [3, 3]
            balance.loads.copy_(torch.tensor([busiest, 3, 1, 1, 1, 1]))
    with torch.inference_mode():
        moved = run_ranks([mover.move for mover in movers])
    assert (moved[0] > 0) is moves and moved[0] == moved[1]


@pytest.mark.parametrize("method", ["rtn", "fp8", "int8"])
def test_moved_experts_of_packed_formats_compute_the_same(method: str, tmp_path: Path) -> None:
    check_moves(make_checkpoint("gpt-oss", tmp_path), 2, quantization=method)


def test_weights_that_share_scales_are_refused(tmp_path: Path) -> None:
    from jackfield.core.nn.quantized_weight import QuantizedWeight

    models, _ = two_ranks(make_checkpoint("gpt-oss", tmp_path), 0, quantization="fp8")
    ranks = thread_ranks(2)
    experts: Any = next(m for m in models[0].model.modules() if isinstance(m, Experts))
    layer = experts.down_proj
    layer.weight = QuantizedWeight(
        layer.weight.values, layer.weight.scale[:, :1], layer.weight.group_size,
        scale_rows=len(layer.weight.values),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="experts share scales") as caught:
        ExpertMover(models[0].model, ranks[0].tensor, CPU)
    assert caught.value.param == "enable_eplb"


# ---------------------------------------------------------------- an engine


def test_times_of_counting_and_moving() -> None:
    times = BalanceTimes(5, 2)
    asked = []
    for step in range(13):
        times.num_steps += step > 0
        while (job := times.due) is not None:
            asked.append((step, job.moves))
            times.done(job)
    assert asked == [(3, False), (5, True), (8, False), (10, True)]
    early = BalanceTimes(5, 9)
    assert early.due == BalanceExperts(moves=False), "what the start has routed does not count"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"enable_eplb": True, "enable_expert_parallel": True}, "enable_eplb"),
        ({"enable_eplb": True, "tensor_parallel_size": 2}, "enable_eplb"),
        ({"eplb_config": {"num_redundant_experts": 2}}, "eplb_config"),
        ({"eplb_config": {"use_async": True}}, "eplb_config"),
        (
            {
                "enable_eplb": True, "enable_expert_parallel": True, "tensor_parallel_size": 2,
                "pipeline_parallel_size": 2,
            },
            "enable_eplb",
        ),
    ],
)  # fmt: skip
def test_options_without_the_others_are_refused(options: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    assert caught.value.param == param


async def test_requests_go_on_while_experts_move(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All tokens choose two experts that the first rank alone has at first."""
    folder = make_checkpoint("gpt-oss", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("router.bias"):
            tensor[2:4] += 60.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    one = await tokens_of_requests(folder, 24)
    with caplog.at_level(logging.INFO, "jackfield.worker"):
        two = await tokens_of_requests(
            folder, 24, tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=True,
            eplb_config={"step_interval": 6, "window_size": 4, "num_redundant_experts": 2},
        )  # fmt: skip
    assert two == one
    texts = [record.getMessage() for record in caplog.records if "experts:" in record.getMessage()]
    assert len(texts) >= 2
    assert not texts[0].endswith(" 0 experts moved")


def test_only_layers_that_balance_count(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", tmp_path)
    model = PagedModel(folder, "float32", ranks=thread_ranks(2, expert_parallel=True)[0]).model
    assert all(m.balance is None for m in model.modules() if isinstance(m, Experts))
