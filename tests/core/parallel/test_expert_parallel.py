"""Expert parallelism: which experts a rank holds, what it reads of a checkpoint, and that an
engine's tokens are those of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_moves import tokens_of_requests
from safetensors import safe_open

from jackfield import AsyncEngine, EngineConfig
from jackfield.core.errors import ConfigError, LoadError
from jackfield.core.loading.build import build_model
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.loading.weight_map import ParameterFiller
from jackfield.core.nn.operations import Operations
from jackfield.core.nn.routing import Routing, RoutingRule
from jackfield.core.parallel.expert_share import ExpertShare
from jackfield.core.parallel.join import join, leave, listen
from jackfield.core.parallel.ranks import ONE_RANK, OneRank, Ranks
from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.paged_model import PagedModel
from jackfield.plugins.conformance.rank_threads import run_ranks, thread_ranks

from helpers import make_checkpoint


def build(folder: Path, ranks: Ranks = ONE_RANK, operations: Any = None, **options: Any) -> Any:
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, **options
    )
    operations = Operations() if operations is None else operations
    resolved = resolve_model_config(config)
    return build_model(load_plugins(), config, resolved, torch.device("cpu"), operations, ranks)


@pytest.mark.parametrize(
    ("num_experts", "size", "own"),
    [
        (8, 2, [range(0, 4), range(4, 8)]),
        (7, 3, [range(0, 3), range(3, 5), range(5, 7)]),
        (3, 3, [range(0, 1), range(1, 2), range(2, 3)]),
    ],
)
def test_ranks_hold_neighbours_and_the_first_ones_more(
    num_experts: int, size: int, own: list[range]
) -> None:
    shares = [ExpertShare.of(num_experts, ranks.tensor) for ranks in thread_ranks(size)]
    assert [share.own for share in shares] == [tuple(numbers) for numbers in own]
    for share in shares:
        names = [str(number) for number in range(num_experts)]
        there = [name for name in names if not share.is_elsewhere(name)]
        assert there == [str(number) for number in share.own]
        assert share.is_elsewhere("0.gate") == (0 not in share.own)
        assert not share.is_elsewhere(str(num_experts)), "no rank has it"


def test_a_rank_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 experts, fewer than the 4 ranks") as caught:
        ExpertShare.of(3, thread_ranks(4)[0].tensor)
    assert caught.value.param == "enable_expert_parallel"


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no experts") as caught:
        build(tmp_path, enable_expert_parallel=True)
    assert caught.value.param == "enable_expert_parallel"


def test_one_rank_holds_all_experts(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path)
    experts = build(tmp_path, enable_expert_parallel=True).model.layers[0].mlp.experts
    assert experts.share is None
    assert list(experts.down_proj.shards) == ["0", "1", "2", "3"]


class OlderOperations(Operations):
    """Operations whose experts do not know of other ranks'."""

    name = "older"
    features = Operations.features - {"experts.foreign"}


def test_operations_that_cannot_skip_experts_are_refused(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path)
    build(tmp_path, thread_ranks(2)[0], OlderOperations())
    with pytest.raises(ConfigError, match=r"'older' .* experts\.foreign") as caught:
        build(tmp_path, thread_ranks(2, expert_parallel=True)[0], OlderOperations())
    assert caught.value.param == "operations"


class NotedRules(Operations):
    """Operations that note from which expert routers count."""

    name = "noted"
    features = Operations.features

    def __init__(self) -> None:
        self.firsts: list[int] = []

    def route(self, logits: torch.Tensor, rule: RoutingRule) -> Routing:
        self.firsts.append(rule.first)
        return super().route(logits, rule)


def test_routers_count_from_the_ranks_first_expert(tmp_path: Path) -> None:
    """No launch of its own subtracts it, unless the numbers of all ranks are noted."""
    make_checkpoint("qwen3-moe", tmp_path)
    operations = NotedRules()
    ranks = thread_ranks(2, expert_parallel=True)[1]
    mlp = build(tmp_path, ranks, operations, load_format="dummy").model.layers[0].mlp
    torch.manual_seed(1)
    mlp.gate.weight.data.normal_()
    x = torch.randn(5, 64)
    counted = mlp._local_choice(x)
    mlp.experts.chosen = torch.zeros(5, mlp.rule.top_k, dtype=torch.int64)
    subtracted = mlp._local_choice(x)
    assert operations.firsts == [4, 0]
    assert torch.equal(counted.experts, subtracted.experts)
    assert torch.equal(mlp.experts.chosen, subtracted.experts + 4)


class CountedFile:
    """A checkpoint's file that counts the elements that are read."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.read: dict[str, int] = {}

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        self.read[name] = tensor.numel()
        return tensor

    def get_slice(self, name: str) -> Any:
        stored, read = self._file.get_slice(name), self.read

        class Counted:
            get_shape = staticmethod(stored.get_shape)

            def __getitem__(self, places: Any) -> torch.Tensor:
                tensor: torch.Tensor = stored[places]
                read[name] = read.get(name, 0) + tensor.numel()
                return tensor

        return Counted()


@pytest.mark.parametrize(
    ("family", "num_experts"), [("qwen3-moe", 7), ("gpt-oss", 6)], ids=["each", "together"]
)
def test_a_rank_reads_its_own_experts_alone(family: str, num_experts: int, tmp_path: Path) -> None:
    """Stored one by one, and all in one tensor."""
    make_checkpoint(family, tmp_path)
    total = 0
    for ranks in thread_ranks(2, expert_parallel=True):
        model = build(tmp_path, ranks, load_format="dummy")
        filler = ParameterFiller(model, model.weight_map)
        with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
            counted = CountedFile(file)
            for name in file.keys():
                filler.fill_from(counted, name)
            stored = {
                name: torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys()
            }
        filler.finish()
        of_experts = [name for name in stored if ".experts." in name]
        total += sum(counted.read.get(name, 0) for name in of_experts)
        others = stored.keys() - set(of_experts)
        assert {name: counted.read[name] for name in others} == {n: stored[n] for n in others}
    assert total == sum(stored[name] for name in of_experts)


def test_a_tensor_of_more_experts_than_the_model_has_is_refused(tmp_path: Path) -> None:
    make_checkpoint("gpt-oss", tmp_path)
    ranks = thread_ranks(2, expert_parallel=True)[0]
    model = build(tmp_path, ranks, load_format="dummy")
    filler = ParameterFiller(model, model.weight_map)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        name = next(name for name in file.keys() if name.endswith("experts.down_proj"))
        stored = file.get_tensor(name)

    class Longer:
        def get_tensor(self, name: str) -> torch.Tensor:
            return torch.cat([stored, stored[:1]])

        def get_slice(self, name: str) -> Any:
            tensor = self.get_tensor(name)

            class Slice:
                def get_shape(self) -> list[int]:
                    return list(tensor.shape)

                def __getitem__(self, places: Any) -> torch.Tensor:
                    return tensor[places]

            return Slice()

    with pytest.raises(LoadError, match="has no such part"):
        filler.fill_from(Longer(), name)


def test_a_missing_expert_is_named_by_its_rank(tmp_path: Path) -> None:
    make_checkpoint("qwen3-moe", tmp_path)
    model = build(tmp_path, thread_ranks(2, expert_parallel=True)[1], load_format="dummy")
    filler = ParameterFiller(model, model.weight_map)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        for name in file.keys():
            # The first rank's are not missed.
            if not any(f"layers.0.mlp.experts.{n}." in name for n in (0, 1, 2, 3, 5)):
                filler.fill_from(file, name)
    with pytest.raises(LoadError, match=r"layers\.0\.mlp\.experts\.5\.") as caught:
        filler.finish()
    assert "experts.0." not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("qwen3-moe", "all_to_all"),
        pytest.param("qwen3-moe", "naive", marks=pytest.mark.slow),
        pytest.param("gpt-oss", "allgather_reducescatter", marks=pytest.mark.slow),
    ],
)
async def test_an_engines_tokens_are_those_of_one_rank(
    family: str, backend: str, tmp_path: Path
) -> None:
    """Rank 0 here and another one in a process, over gloo, with experts of unequal number."""
    folder = make_checkpoint(family, tmp_path)
    one = await tokens_of_requests(folder, 16)
    options = {"enable_expert_parallel": True, "all2all_backend": backend}
    assert await tokens_of_requests(folder, 16, tensor_parallel_size=2, **options) == one


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo moves what is in host memory")
@pytest.mark.parametrize("eplb", [False, True])
def test_tokens_that_go_to_their_experts_are_computed_as_by_one_rank(
    eplb: bool, tmp_path: Path
) -> None:
    """Of three ranks, in threads over gloo, each with a part of the tokens, and the first one with
    more of the seven experts; or each with three, copies included."""
    folder = make_checkpoint("qwen3-moe", tmp_path)
    options: dict[str, Any] = {"enable_expert_parallel": True, "tensor_parallel_size": 3}
    # Fewer experts of a token than ranks: rows are counted.
    options["hf_overrides"] = {"num_experts_per_tok": 3 if eplb else 2}
    if eplb:
        options |= {"enable_eplb": True, "eplb_config": {"num_redundant_experts": 2}}
    config = EngineConfig(
        device="cpu", all2all_backend="all_to_all", distributed_timeout_seconds=30, **options
    )
    plugins, listener = load_plugins(), listen()
    address = listener.getsockname()[:2]
    torch.manual_seed(3)
    x = torch.randn(20, 64)

    def run(rank: int) -> torch.Tensor:
        ranks = join(
            config, plugins, rank=rank, address=address, listener=None if rank else listener
        )
        try:
            # Attention is left out: its heads cannot be divided by three.
            alone = replace(ranks, tensor=OneRank())
            model = PagedModel(folder, "float32", ranks=alone, **options).model
            mlp: Any = model.model.layers[0].mlp
            mlp.ranks = ranks
            with torch.inference_mode():
                return torch.cat([mlp(x[:count].clone(), None) for count in (20, 1, 5)])
        finally:
            leave(ranks)

    overrides = options["hf_overrides"]
    whole: Any = PagedModel(folder, "float32", hf_overrides=overrides).model
    with torch.inference_mode():
        want = torch.cat([whole.model.layers[0].mlp(x[:n].clone(), None) for n in (20, 1, 5)])
    for got in run_ranks([lambda rank=rank: run(rank) for rank in range(3)]):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "it needs enable_expert_parallel"),
        (
            {
                "enable_expert_parallel": True,
                "tensor_parallel_size": 2,
                "name": "deepep_low_latency",
            },
            "no all2all backend named 'deepep_low_latency'",
        ),
    ],
)
async def test_backends_that_are_not_there_are_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    name = options.pop("name", "all_to_all")
    with pytest.raises(ConfigError, match=message) as caught:
        await AsyncEngine(EngineConfig(device="cpu", all2all_backend=name, **options)).start()
    assert caught.value.param == "all2all_backend"


def test_parts_of_experts_are_whole(tmp_path: Path) -> None:
    """A rank's experts are the checkpoint's, bit for bit."""
    make_checkpoint("qwen3-moe", tmp_path)
    whole: Any = PagedModel(tmp_path, "float32").model
    banks = [layer.mlp.experts.down_proj.weight for layer in whole.model.layers[::2]]
    for ranks in thread_ranks(2, expert_parallel=True):
        part: Any = PagedModel(tmp_path, "float32", ranks=ranks).model
        for bank, layer in zip(banks, part.model.layers[::2], strict=True):
            own = layer.mlp.experts.share.own
            rows = len(bank) // 7
            held = layer.mlp.experts.down_proj.weight
            assert torch.equal(held, bank[own[0] * rows : (own[-1] + 1) * rows])
