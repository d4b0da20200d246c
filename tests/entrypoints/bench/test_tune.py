"""What `jackfield bench tune` writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jackfield.core.errors import ConfigError
from jackfield.entrypoints.bench.kernels import tune, tune_gemv, tune_int4
from jackfield.entrypoints.bench.kernels.token_layer import Extras, Layer

FACTS = {"date": "later", "commit": "b", "torch": "2", "triton": "3", "device": "a card"}


def entry(rows: int) -> dict[str, Any]:
    return {"outputs": 64, "inputs": 128, "gated": False, "rows": rows, "config": None, "us": 1.0}


def test_what_is_not_measured_again_keeps_its_place_and_date() -> None:
    about = {"date": "early", "commit": "a", "torch": "1", "triton": "2"}
    first = json.loads(tune.page({}, {**FACTS, **about}, {"small_m_matmul": [entry(8)]}))
    assert first["small_m_matmul"] == [entry(8)]
    assert first["int4_gemv"] == []
    both = json.loads(tune.page(first, FACTS, {"int4_gemv": [entry(1)]}))
    assert both["small_m_matmul"] == [entry(8)]
    assert both["int4_gemv"] == [entry(1)]
    assert both["date"] == "later"
    assert both["measured"]["small_m_matmul"] == about
    assert both["measured"]["int4_gemv"]["commit"] == "b"


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"gemv": [{"outputs": 64}]}', '{"gemv": 1}', '{"measured": 1}', "\x00", "{" * 9],
)
def test_a_damaged_file_is_refused_before_anything_is_measured(text: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "new" / "device.json"
    assert tune.known_choices(path) == {}
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"--output: .*device\.json"):
        tune.known_choices(path)
    path.write_text(tune.page({}, FACTS, {"small_m_matmul": [entry(8)]}))
    assert tune.known_choices(path)["small_m_matmul"] == [entry(8)]
    with pytest.raises(ConfigError, match="--output"):
        tune.known_choices(path / "below_a_file.json")


@pytest.mark.parametrize("product", tune.products("Qwen3-8B"), ids=str)
def test_4_bit_candidates_are_shapes_that_fit(product: tuple[int, int, bool]) -> None:
    pytest.importorskip("triton")
    from jackfield.kernels.tuning import CONFIGS

    for kernel, counts in tune_int4.ROWS.items():
        for rows in counts:
            configs = [CONFIGS[kernel](*c) for c in tune_int4.candidates(kernel, product, rows)]
            assert configs
            assert len(set(configs)) == len(configs)


def test_products_of_one_token_fit_and_experts_are_left_out() -> None:
    pytest.importorskip("triton")
    assert tune.layer_of("Gemma-2-9B").products
    shapes = tune.products("Qwen3-30B-A3B")
    assert (5120, 2048, False) in shapes and (2048, 4096, False) in shapes
    assert all(outputs < 10_000 for outputs, *_ in shapes)
    for product in [*shapes, *tune.products("GPT-2-XL")]:
        configs = list(tune_gemv.candidates(product))
        assert len(set(configs)) == len(configs) > 4


def test_tiles_are_changed_while_the_whole_gets_faster() -> None:
    """Two products that are fast together, where neither is with the other's first tiles."""
    times = {("a", "a"): 10.0, ("b", "a"): 9.98, ("a", "b"): 9.0, ("b", "b"): 7.0}
    found, best, leaders = tune_gemv.descend(
        {1: "a", 2: "a"}, {1: ["a", "b"], 2: ["a", "b"]}, lambda tiles: times[tiles[1], tiles[2]]
    )
    assert found == {1: "b", 2: "b"} and best == 7.0
    assert leaders == {1: ["b", "a"], 2: ["b", "a"]}


def test_a_product_keeps_the_tiles_of_the_first_model() -> None:
    chosen = {(64, 32, False): (1, 2, 3, True, 0), (32, 64, False): (4, 5, 6, False, 66)}
    known = [{"outputs": 64, "inputs": 32, "gated": False}]
    pytest.importorskip("triton")
    (entry,) = tune.gemv_entries("one", "layer", (chosen, 9.0, 8.0), known)
    assert entry["outputs"] == 32 and entry["config"] == {
        "block_n": 4, "block_k": 5, "num_warps": 6, "early": False, "ahead": 66,
    }  # fmt: skip
    assert entry["layer_us"] == 8.0 and entry["rule_us"] == 9.0


def test_attention_follows_a_projection_to_heads() -> None:
    """A layer is timed with attention where its first product makes queries, keys and values."""
    assert tune.layer_of("SmolLM3-3B").heads == (16, 4, 128)
    assert tune.layer_of("DeepSeek-V2-Lite").heads is None
    assert tune.layer_of("Mamba2-2.7B").heads is None


def test_a_product_is_timed_with_what_its_kernel_computes_besides() -> None:
    """Biases cost a small layer a tenth, so tiles are chosen with them."""
    layer = tune.layer_of("GPT-2-XL")
    assert layer.products[6400, 1600, False] == Extras(True, True, "gelu_new")
    assert layer.products[1600, 6400, False] == Extras(True, True)
    biased = [each.biased for each in tune.layer_of("Qwen2.5-7B").products.values()]
    assert biased == [True, False, False, False]


def test_the_vocabulary_is_timed_after_the_last_product() -> None:
    """With the final norm, whose sums over it nobody makes; whether it is tied or not."""
    layer = tune.layer_of("GPT-2-XL")
    assert layer.vocabulary == ((50257, 1600, False), Extras(True, summed=False))
    ending, last = tune.last_products(layer)
    assert last == (1600, 6400, False)
    assert list(ending.products) == [last, (50257, 1600, False)] and ending.heads is None
    vocabulary = tune.layer_of("Qwen3-8B").vocabulary
    assert vocabulary is not None and vocabulary[0] == (151936, 4096, False)


@pytest.mark.parametrize("given", [None, (4, 512, 4, True, 66)])
def test_a_product_that_is_kept_stays_as_it_is(
    given: tune_gemv.Choice | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is given, or as an engine has it; others are tried beside it."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from jackfield.kernels.linear.gemv import GemvConfig

    kept, tuned = (64, 128, False), (4096, 64, False)
    engine = GemvConfig(2, 256, 1, False, 0)
    seen = set()

    class Product:
        gated = False

        def __init__(self, rows: int, inputs: int) -> None:
            self.weights = [torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta")]

        def multiply(self, config: GemvConfig) -> Any:
            return torch.ones(1)

    class Timed:
        def __init__(self, layer: Layer) -> None:
            self.products = {each: Product(*each[:2]) for each in layer.products}

        def engine_configs(self) -> dict[Any, GemvConfig]:
            return dict.fromkeys(self.products, engine)

        def seconds(self, configs: dict[Any, GemvConfig], repeats: int) -> float:
            seen.add(configs[kept])
            best = configs[tuned] == GemvConfig(8, 64, 1, True, 264)
            return (1.0 if best else 2.0 if configs[tuned][:3] == (8, 64, 1) else 3.0) * 1e-6

    monkeypatch.setattr(tune_gemv, "TokenLayer", Timed)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    sizes = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: sizes)
    layer = Layer({kept: Extras(), tuned: Extras()})
    found = tune_gemv.tune(layer, lambda jobs: set(jobs), {kept: given})
    assert found == ({tuned: (8, 64, 1, True, 264)}, 3.0, 1.0)
    assert seen == {engine if given is None else GemvConfig(*given)}


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.01, True), (1.1, False)])
def test_tiles_that_multiply_wrongly_are_left_out(factor: float, right: bool) -> None:
    torch = pytest.importorskip("torch")
    expected = torch.tensor([[3.0, -8.0]])
    assert tune_gemv.is_right((1, 2, 3, True, 0), expected, lambda _: expected * factor) is right
    nothing = torch.full_like(expected, float("nan"))
    assert not tune_gemv.is_right((1, 2, 3, True, 0), expected, lambda _: nothing)


@pytest.mark.parametrize(("outputs", "early"), [(64, False), (1 << 12, True)])
def test_a_rule_without_an_early_start_is_chosen_with_the_one_it_comes_to(
    outputs: int, early: bool
) -> None:
    """By the size of the weight, as a launch has it: 8 KiB a row, of 16 MiB and more."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from jackfield.kernels.linear.gemv import GemvConfig

    weight = torch.empty(outputs, 1 << 12, dtype=torch.bfloat16, device="meta")
    assert tune_gemv.choice_of(GemvConfig(4, 512, 2), weight) == (4, 512, 2, early, 0)
    given = GemvConfig(4, 512, 2, not early, 66)
    assert tune_gemv.choice_of(given, weight) == (4, 512, 2, not early, 66)
