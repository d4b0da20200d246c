"""Models that run on `transformers`' modules say what they say without us: in chunks, beside
others, after preemption, from cached prefixes, quantized and divided."""

from __future__ import annotations

import dataclasses
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_families import LEFT_OUT, PROMPTS, checkpoint, make_reference, score
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, LoadError
from jackfield.core.hooks import hookimpl
from jackfield.core.loading.quantize import quantized_layers
from jackfield.core.nn.attention import Attention
from jackfield.core.registry import load_plugins
from jackfield.core.step import PrepareAhead
from jackfield.plugins.attention.torch import TorchAttention
from jackfield.plugins.conformance.paged_model import PagedModel, assert_near
from jackfield.plugins.conformance.rank_threads import run_ranks, thread_ranks
from jackfield.plugins.executors.inprocess import InProcessExecutor
from jackfield.plugins.models.fallback.attention import HeadsAttention
from jackfield.plugins.models.fallback.build import on_meta
from jackfield.plugins.models.fallback.model import TransformersLM
from jackfield.plugins.models.fallback.modules import RoutedExperts

from helpers import at_once

WINDOWS = {
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MIXTURE = {
    "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_dense_layers": 1,
}  # fmt: skip
SPARSE = {**MIXTURE, "mlp_layer_types": ["dense", "sparse", "sparse"]}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {**MIXTURE, **WINDOWS},
    "AriaTextForCausalLM": {"moe_num_experts": 4},
    "AXK1ForCausalLM": {**MIXTURE, **LATENT, "n_group": 2, "topk_group": 1},
    "BeamForCausalLM": {**SPARSE, **WINDOWS, "n_group": 1, "topk_group": 1},
    "BitNetForCausalLM": {},
    "Cohere2MoeForCausalLM": {**MIXTURE, **WINDOWS},
    "CTRLLMHeadModel": {},
    "DeepseekV2ForCausalLM": {
        **MIXTURE, **LATENT, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    },
    "DeepseekV3ForCausalLM": {**MIXTURE, **LATENT, "n_group": 2, "topk_group": 1},
    "Emu3ForCausalLM": {},
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32},
    "ExaoneMoeForCausalLM": {**SPARSE, **WINDOWS},
    "FlexOlmoForCausalLM": MIXTURE,
    "FlintForCausalLM": {**SPARSE, **WINDOWS},
    "Glm4MoeLiteForCausalLM": {**SPARSE, **LATENT, "n_group": 2, "topk_group": 1},
    "GraniteMoeForCausalLM": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "logits_scaling": 2.5,
        "residual_multiplier": 0.4, "attention_multiplier": 0.6, "embedding_multiplier": 3.0,
    },
    "GraniteMoeSharedForCausalLM": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 48,
    },
    "GraniteMoeSWAForCausalLM": {**WINDOWS, "num_local_experts": 8, "num_experts_per_tok": 2},
    "HYV3ForCausalLM": SPARSE,
    "HunYuanMoEV1ForCausalLM": {"num_experts": 8, "moe_topk": 2},
    "Kolibri1ForCausalLM": {**MIXTURE, **WINDOWS},
    "LagunaForCausalLM": {**SPARSE, **WINDOWS},
    "MellumForCausalLM": {**MIXTURE, **WINDOWS, "rope_parameters": LEFT_OUT},
    "MiMoV2FlashForCausalLM": {**SPARSE, **WINDOWS, "v_head_dim": 8},
    "MiniCPM3ForCausalLM": LATENT,
    "MiniMaxM2ForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "ModernBertDecoderForCausalLM": {"local_attention": 12},
    "OlmoeForCausalLM": MIXTURE,
    "SolarOpenForCausalLM": MIXTURE,
    "YoutuForCausalLM": LATENT,
}  # fmt: skip
"""Architecture → differences from the kit's tiny configuration."""
OLDER = tuple(map(int, transformers.__version__.split(".")[:2])) <= (5, 17)


def folder_of(case: str, changes: dict[str, Any], folder: Path) -> tuple[Any, Path]:
    """Return a random model of transformers, and its checkpoint."""
    name = case.partition(":")[0]
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    kind = getattr(transformers, name).config_class
    known = {field.name for field in dataclasses.fields(kind)} | {"rope_parameters", "head_dim"}
    reference = make_reference(case, {k: v for k, v in changes.items() if k in known})
    return reference, checkpoint(reference, name, folder)


WAITING = {
    f"aten::{name}" for name in (
        "_local_scalar_dense", "item", "is_nonzero", "nonzero", "argwhere", "equal", "allclose",
        "masked_select", "unique_consecutive", "_unique2", "bincount", "repeat_interleave.Tensor",
    )
}  # fmt: skip
"""What torch answers on the host, or gives a shape that depends on values."""


class NoValues(TorchDispatchMode):
    """Refuses what waits for the device, as a stream does whose work is recorded."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        masks = function._schema.name == "aten::index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if masks or function._schema.name in WAITING:
            raise RuntimeError(f"{function} is not permitted when a stream is capturing")
        return function(*args, **(kwargs or {}))


def without_values(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Let a model's modules ask for no values; what stands for kernels may, on a CPU."""
    states = model._states

    def strict(*args: Any, **options: Any) -> Any:
        with NoValues():
            return states(*args, **options)

    def unwatched(forward: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            with _disable_current_modes():
                return forward(*args, **options)

        return run

    monkeypatch.setattr(model, "_states", strict)
    for kind in (HeadsAttention, RoutedExperts):
        monkeypatch.setattr(kind, "forward", unwatched(kind.forward))


@pytest.mark.parametrize("case", CASES)
def test_a_model_equals_itself_in_transformers(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a step of one token can be recorded: its modules do not ask what it computes."""
    if case == "AriaTextForCausalLM" and OLDER:
        pytest.skip("its experts ask for values in transformers 5.17, and so are refused")
    reference, folder = folder_of(case, CASES[case], tmp_path)
    model = PagedModel(folder, "float32", model_impl="transformers")
    prompt = PROMPTS[1]
    parts = [model.run({0: part})[0] for part in (prompt[:11], prompt[11:-1])]
    without_values(monkeypatch, model.model)
    got = torch.cat([*parts, model.run({0: prompt[-1:]})[0]])
    assert_near(got, score(reference, prompt), 1e-3)


def engine(folder: Path, plugins: Any = None, **options: Any) -> AsyncEngine:
    settings: dict[str, Any] = {
        "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 4,
        "max_num_batched_tokens": 16, "block_size": 4, "num_gpu_blocks_override": 96,
        "model_impl": "transformers", **options,
    }  # fmt: skip
    return AsyncEngine(EngineConfig(model=str(folder), **settings), plugins=plugins)


async def answer(engine: AsyncEngine, prompt: list[int]) -> Any:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    *_, last = [output async for output in engine.generate(prompt, params)]
    return last


def check(reference: Any, prompt: list[int], output: Any) -> None:
    """Each token is the reference's best, and has its log-probability."""
    chosen = output.outputs[0]
    wanted = score(reference, prompt + chosen.token_ids)[len(prompt) - 1 : -1]
    assert len(chosen.token_ids) == 6
    for row, token, told in zip(wanted, chosen.token_ids, chosen.logprobs, strict=True):
        assert float(row.max() - row[token]) <= 1e-3
        assert told[token].logprob == pytest.approx(float(row[token]), abs=1e-3)


@pytest.mark.parametrize(
    ("case", "blocks"),
    [("FlintForCausalLM", 26), ("MiMoV2FlashForCausalLM", 14), ("BitNetForCausalLM", 14)],
)
async def test_requests_share_steps_chunks_prefixes_and_blocks(
    case: str, blocks: int, tmp_path: Path
) -> None:
    """In few blocks, requests are preempted and computed again."""
    reference, folder = folder_of(case, CASES[case], tmp_path)
    prompts = [*PROMPTS, PROMPTS[1][:20] + PROMPTS[0]]
    async with engine(folder) as roomy:
        answers = await at_once(roomy, *(answer(roomy, prompt) for prompt in prompts))
        again = await answer(roomy, PROMPTS[1])
        assert again.num_cached_tokens >= 36
    short = [PROMPTS[1][n : 2 * n] for n in (16, 14, 15)]
    async with engine(folder, num_gpu_blocks_override=blocks) as narrow:
        preempted = await at_once(narrow, *(answer(narrow, prompt) for prompt in short))
        assert narrow.core.stats().num_preemptions > 0
    outputs = [*answers, again, *preempted]
    for prompt, output in zip([*prompts, PROMPTS[1], *short], outputs, strict=True):
        check(reference, prompt, output)


class StaticAttention(TorchAttention):
    """Fit to be called again with the same metadata: every length is the longest."""

    graph_safe = True

    def forward(self, spec: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any):
        metadata.chunks.clear()
        return super().forward(spec, query, key, value, kv_cache, metadata)


class Recorded:
    """A plugin whose executor records decode steps: a replay calls the function again."""

    jackfield_api = 3
    replays = 0

    @hookimpl
    def register_attention_backends(self, registry: Any) -> None:
        registry.add("static", StaticAttention)

    @hookimpl
    def register_executors(self, registry: Any) -> None:
        def record(function: Any) -> Any:
            function()

            def replay() -> None:
                self.replays += 1
                function()

            return replay

        class Recording(InProcessExecutor):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                self._worker._recorder = lambda: record  # type: ignore[method-assign]

        registry.add("recording", Recording)


RECORDED = {"device": "cpu", "executor": "recording", "attention_backend": "static"}


@pytest.mark.parametrize("case", ["BitNetForCausalLM", "DeepseekV3ForCausalLM"])
async def test_decode_steps_are_recorded(case: str, tmp_path: Path) -> None:
    reference, folder = folder_of(case, CASES[case], tmp_path)
    plugin = Recorded()
    options = {**RECORDED, "operations": "torch", "plugins": load_plugins(extra=[plugin])}
    async with engine(folder, **options) as one:
        answers = await at_once(one, *(answer(one, prompt) for prompt in PROMPTS))
        assert one.stats().graph_recording_failures == 0
    assert plugin.replays >= 5
    for prompt, output in zip(PROMPTS, answers, strict=True):
        check(reference, prompt, output)


async def test_modules_that_ask_for_values_are_launched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is counted and logged, and tokens come all the same."""
    reference, folder = folder_of("BitNetForCausalLM", {}, tmp_path)
    capturing = [False]
    states = TransformersLM._states

    def ask(self: Any, *args: Any) -> Any:
        hidden = states(self, *args)
        if capturing[0]:
            with NoValues():
                hidden.abs().max().item()
        return hidden

    monkeypatch.setattr(TransformersLM, "_states", ask)

    def record(function: Any) -> Any:
        capturing[0] = True
        try:
            function()
        finally:
            capturing[0] = False

    class Other(Recorded):
        @hookimpl
        def register_executors(self, registry: Any) -> None:
            class Recording(InProcessExecutor):
                def __init__(self, *args: Any) -> None:
                    super().__init__(*args)
                    self._worker._recorder = lambda: record  # type: ignore[assignment]

            registry.add("recording", Recording)

    caplog.set_level("WARNING", "jackfield.worker")
    async with engine(folder, **RECORDED, plugins=load_plugins(extra=[Other()])) as one:
        check(reference, PROMPTS[0], await answer(one, PROMPTS[0]))
        assert one.stats().graph_recording_failures == 2
    lines = [record.getMessage() for record in caplog.records]
    assert sum("as a CUDA graph failed" in line for line in lines) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["BitNetForCausalLM", "FlintForCausalLM", "OlmoeForCausalLM"])
async def test_recorded_steps_equal_launched_ones(case: str, tmp_path: Path) -> None:
    reference, folder = folder_of(case, CASES[case], tmp_path)
    options: dict[str, Any] = {"device": "cuda", "max_num_batched_tokens": 64}
    async with engine(folder, **options) as one:
        while await one.core.executor.ask(PrepareAhead()):
            pass
        answers = await at_once(one, *(answer(one, prompt) for prompt in PROMPTS))
        assert one.stats().graph_recording_failures == 0
    for prompt, output in zip(PROMPTS, answers, strict=True):
        check(reference, prompt, output)


@pytest.mark.parametrize("case", ["FlintForCausalLM", "DeepseekV3ForCausalLM", "OlmoeForCausalLM"])
def test_ranks_compute_together_what_one_does(case: str, tmp_path: Path) -> None:
    """In the second case a plan divides experts and MLPs, and leaves attention whole; in the third
    it gathers the outputs of attention's products, which each rank has whole."""
    _, folder = folder_of(case, CASES[case], tmp_path)
    options: dict[str, Any] = {"model_impl": "transformers"}
    models = [PagedModel(folder, "float32", ranks=r, **options) for r in thread_ranks(2)]
    one = PagedModel(folder, "float32", **options)
    want = one.run({0: PROMPTS[1]})[0]
    for got in run_ranks([lambda m=m: m.run({0: PROMPTS[1]}) for m in models]):  # type: ignore[misc]
        assert_near(got[0], want, 2e-4)
    sizes = [sum(p.numel() for p in m.model.parameters()) for m in (one, *models)]
    assert max(sizes[1:]) < sizes[0], "a rank holds all weights"


@pytest.mark.parametrize(
    ("case", "size", "reason"),
    [
        ("FlintForCausalLM", 4, "num_key_value_heads 2 is no multiple of 4"),
        ("BitNetForCausalLM", 2, "transformers has no plan for it"),
        ("MiMoV2FlashForCausalLM", 2, r"self_attn\S* would be divided as"),
    ],
)
def test_what_ranks_cannot_divide_is_refused_by_name(
    case: str, size: int, reason: str, tmp_path: Path
) -> None:
    _, folder = folder_of(case, CASES[case], tmp_path)
    with pytest.raises(ConfigError, match=reason) as caught:
        PagedModel(folder, "float32", model_impl="transformers", ranks=thread_ranks(size)[0])
    assert caught.value.param == "tensor_parallel_size"


def test_products_and_experts_are_quantized(tmp_path: Path) -> None:
    reference, folder = folder_of("FlintForCausalLM", CASES["FlintForCausalLM"], tmp_path)
    model = PagedModel(folder, "float32", model_impl="transformers", quantization="int8")
    names = set(quantized_layers(model.model))
    assert {f"hf.model.layers.0.self_attn.{part}_proj.linear" for part in "qkvo"} <= names
    assert [name for name in names if name.endswith("mlp.experts.gate_up_proj")]
    assert not [name for name in names if name.endswith(("gate", "lm_head", "gate.linear"))]
    got = model.run({0: PROMPTS[1]})[0].log_softmax(-1).cpu()
    difference = (got - score(reference, PROMPTS[1])).abs().mean()
    assert 0 < float(difference) < 0.1


def test_layers_say_what_attention_needs(tmp_path: Path) -> None:
    """Windows, sinks, heads and widths are those of each module's call."""
    _, folder = folder_of("MiMoV2FlashForCausalLM", CASES["MiMoV2FlashForCausalLM"], tmp_path)
    model = PagedModel(folder, "float32", model_impl="transformers").model
    specs = [module.spec for module in model.modules() if isinstance(module, Attention)]
    assert [spec.sinks for spec in specs] == [True, False, True]
    assert [spec.sliding_window is None for spec in specs] == [False, True, False]


def test_ropes_that_change_with_a_batch_are_fixed(tmp_path: Path) -> None:
    """A longer request beside another changes nothing of it."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    changes = {"rope_parameters": rope, "max_position_embeddings": 16}
    _, folder = folder_of("SolarOpenForCausalLM", {**MIXTURE, **changes}, tmp_path)
    options: dict[str, Any] = {"model_impl": "transformers", "max_model_len": 32}
    alone, beside = (PagedModel(folder, "float32", **options) for _ in range(2))
    want = alone.run({0: PROMPTS[0]})[0]
    got = beside.run({0: PROMPTS[0], 1: PROMPTS[1][:30]})[0]
    assert_near(got, want, 2e-4)


async def test_the_log_says_once_that_it_is_the_fallback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, folder = folder_of("BitNetForCausalLM", {}, tmp_path)
    with caplog.at_level(logging.INFO, "jackfield.loading"):
        async with engine(folder, model_impl="auto") as one:
            await answer(one, PROMPTS[0])
    lines = [record.message for record in caplog.records if "fallback" in record.message]
    assert len(lines) == 1 and "BitNetForCausalLM" in lines[0]


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        ("DiffLlamaForCausalLM", {}, "attends more than once"),
        ("DogeForCausalLM", {}, "a mask of its own"),
        ("BertLMHeadModel", {}, "is not causal"),
        ("XGLMForCausalLM", {}, "does not let others compute its attention"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", *["full_attention"] * 2]}, "conv"),
        ("JetMoeForCausalLM", {"num_key_value_heads": 2}, "do not run without values"),
    ],
)
def test_other_models_are_refused_with_the_reason(
    case: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    _, folder = folder_of(case, changes, tmp_path)
    with pytest.raises(ConfigError, match=reason) as caught:
        PagedModel(folder, "float32", model_impl="transformers")
    assert caught.value.param == "model"


def test_tokens_that_meet_outside_attention_are_noticed(tmp_path: Path) -> None:
    """A layer that looks at the token beside, as a convolution does, is refused once loaded."""
    _, folder = folder_of("SolarOpenForCausalLM", MIXTURE, tmp_path)
    model: Any = PagedModel(folder, "float32", model_impl="transformers").model
    model.after_loading()
    layer = model.hf.model.layers[1]
    layer.register_forward_hook(lambda module, inputs, out: out + 0.5 * out.roll(1, dims=1))
    with pytest.raises(ConfigError, match="meet outside attention"):
        model.after_loading()


def test_model_impl_names_whose_code_runs(tmp_path: Path) -> None:
    _, folder = folder_of("BitNetForCausalLM", {}, tmp_path / "bitnet")
    with pytest.raises(ConfigError, match=r"'BitNetForCausalLM' .* is not supported") as caught:
        PagedModel(folder, "float32", model_impl="jackfield")
    assert caught.value.param == "model"
    _, folder = folder_of("LlamaForCausalLM", {}, tmp_path / "llama")
    kinds = {
        choice: type(PagedModel(folder, "float32", model_impl=choice).model).__name__
        for choice in ("auto", "jackfield", "vllm", "transformers")
    }
    assert kinds.pop("transformers") == "TransformersLM"
    assert set(kinds.values()) == {"LlamaForCausalLM"}


def test_a_name_without_a_model_anywhere_is_refused(tmp_path: Path) -> None:
    _, folder = folder_of("BitNetForCausalLM", {}, tmp_path)
    path = folder / "config.json"
    path.write_text(path.read_text().replace("BitNetForCausalLM", "NobodyForCausalLM"))
    with pytest.raises(ConfigError, match="model_impl: 'transformers' cannot serve") as caught:
        PagedModel(folder, "float32", model_impl="transformers")
    assert caught.value.param == "model_impl"
    with pytest.raises(ConfigError, match="transformers has no causal model of that name"):
        PagedModel(folder, "float32")


def test_models_that_look_at_places_in_a_step_are_refused(tmp_path: Path) -> None:
    _, folder = folder_of("PhimoeForCausalLM", {"num_local_experts": 4}, tmp_path)
    with pytest.raises(ConfigError, match="a token's place in the step"):
        PagedModel(folder, "float32", model_impl="transformers")


def test_weights_have_their_names_in_checkpoints(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _, folder = folder_of("OlmoeForCausalLM", MIXTURE, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.layers.1.mlp.experts.5.up_proj.weight", "model.norm.weight"):
        left = {key: value for key, value in tensors.items() if key != name}
        save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(LoadError, match=name):
            PagedModel(folder, "float32", model_impl="transformers")
    save_file({**tensors, "model.extra": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"model\.extra"):
        PagedModel(folder, "float32", model_impl="transformers")


def test_the_registry_has_one_fallback() -> None:
    registry = load_plugins()["model"]
    assert registry.entry("*").provenance.distribution == "jackfield"


def test_threads_that_create_models_leave_torch_as_it_was() -> None:
    """Engines of one process may start at once."""
    original = torch.nn.init.normal_
    inside, leave = threading.Event(), threading.Event()

    def create() -> None:
        with on_meta():
            inside.set()
            leave.wait()

    other = threading.Thread(target=create)
    with on_meta():
        other.start()
        inside.wait(0.1)  # It comes in if nothing holds it back.
    leave.set()
    other.join()
    assert torch.nn.init.normal_ is original
