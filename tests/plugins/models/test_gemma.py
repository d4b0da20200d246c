"""What the Gemmas have that others have not: each part by hand, and all on Triton's kernels."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from encoders import reference_logits, reference_states, save_decoder
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError
from jackfield.core.loading.build import build_model
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.loading.quantize import quantized_layers
from jackfield.core.nn.attention import Attention
from jackfield.core.nn.context import BuildContext
from jackfield.core.nn.norm import OffsetRMSNorm
from jackfield.core.nn.operations import Operations
from jackfield.core.parallel.ranks import Pipeline
from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.paged_model import PagedModel
from jackfield.plugins.models.gemma4 import check_stages

from helpers import VOCAB, edit_json, make_checkpoint, reference_model

NAMES = ("gemma", "gemma2", "gemma3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_checkpoint(name, tmp_path_factory.mktemp(name)) for name in NAMES}


def load(folder: Path, **options: Any) -> Any:
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", **options)
    return build_model(
        load_plugins(), config, resolve_model_config(config), torch.device("cpu"), Operations()
    )


def score(model: Any, tokens: list[int]) -> torch.Tensor:
    """A `transformers` model's log-probabilities, [tokens, vocab]"""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_factors_of_a_norm_are_not_rounded_to_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = OffsetRMSNorm(96, 1e-6, BuildContext(torch.device("cpu"), dtype, Operations()))
    theirs = GemmaRMSNorm(96, 1e-6).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(0.01 * torch.randn(96))
        theirs.weight.copy_(norm.weight)
    norm.after_loading()
    x = (3 * torch.randn(50, 96)).to(dtype)
    with torch.no_grad():
        assert torch.equal(norm(x), theirs(x))
    assert norm.norm.weight.dtype == torch.float32
    assert not torch.equal(norm.norm.weight, norm.norm.weight.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embeddings_are_scaled_as_transformers_rounds_it(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 48, "intermediate_size": 64, "head_dim": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 1}
    theirs = transformers.GemmaForCausalLM(transformers.GemmaConfig(**sizes, **heads)).to(dtype)
    theirs.save_pretrained(tmp_path)
    ours = PagedModel(tmp_path, str(dtype).removeprefix("torch."), kernels="torch").model
    tokens = torch.arange(50)
    with torch.no_grad():
        expected = theirs.model.embed_tokens(tokens)
        here = tokens.to(ours.model.embed_tokens.weight.device)  # type: ignore[union-attr]
        actual = ours.model.embed(here, here)  # type: ignore[union-attr, operator]
    assert torch.equal(actual.cpu(), expected)


def test_layers_ask_for_windows_caps_and_scales(folders: dict[str, Path]) -> None:
    specs = {
        name: [m.spec for m in load(folders[name]).modules() if isinstance(m, Attention)]
        for name in NAMES
    }
    assert [spec.features for spec in specs["gemma"]] == [frozenset()] * 3
    assert [spec.sliding_window for spec in specs["gemma2"]] == [24, None, 24]
    assert {spec.soft_cap for spec in specs["gemma2"]} == {2.0}
    assert [spec.sliding_window for spec in specs["gemma3"]] == [24, None, 24]
    assert {spec.soft_cap for spec in specs["gemma3"]} == {None}
    for spec in specs["gemma2"] + specs["gemma3"]:
        assert spec.scale == pytest.approx(40**-0.5)


def test_rotations_are_shared_by_layers_of_a_kind(folders: dict[str, Path]) -> None:
    local, whole, again = load(folders["gemma3"]).model.rotaries
    assert local is again
    # Channel 0 turns by one a token, divided by 4 where the rope is stretched.
    torch.testing.assert_close(local.cos_sin[8, 0], torch.tensor(8.0).cos())
    torch.testing.assert_close(whole.cos_sin[8, 0], torch.tensor(2.0).cos())
    plain = load(folders["gemma2"]).model.rotaries
    assert plain[0] is plain[1] is plain[2]


def test_configurations_before_rope_parameters_are_read(folders: dict[str, Path]) -> None:
    """`rope_theta`, `rope_local_base_freq`, `rope_scaling` and `sliding_window_pattern`."""
    old = json.loads((folders["gemma3"] / "config.json").read_text())
    for name in ("rope_parameters", "layer_types"):
        del old[name]
    old |= {
        "rope_theta": 1000.0, "rope_local_base_freq": 10.0, "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }  # fmt: skip
    config = EngineConfig(model=str(folders["gemma3"]), device="cpu")
    folder = folders["gemma3"].parent / "old"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(old))
    new = resolve_model_config(config)
    actual = resolve_model_config(EngineConfig(model=str(folder), device="cpu"))
    assert actual.hf_config.rope_parameters == new.hf_config.rope_parameters
    assert actual.hf_config.layer_types == new.hf_config.layer_types
    assert actual.max_model_len == 512


@pytest.mark.parametrize("name", NAMES)
def test_attention_in_both_directions_is_refused(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((folders[name] / "config.json").read_text())
    edit_json(tmp_path / "config.json", use_bidirectional_attention=True)
    with pytest.raises(ConfigError, match="use_bidirectional_attention") as caught:
        load(tmp_path, load_format="dummy")
    assert caught.value.param == "use_bidirectional_attention"


def test_an_activation_is_refused_by_its_fields_name(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    for name, field in (("gemma", "hidden_act"), ("gemma2", "hidden_activation")):
        (tmp_path / "config.json").write_text((folders[name] / "config.json").read_text())
        edit_json(tmp_path / "config.json", **{field: "relu2"})
        with pytest.raises(ConfigError, match=f"^{field}: 'relu2'") as caught:
            load(tmp_path, load_format="dummy")
        assert caught.value.param == field


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_kernels_equal_transformers(name: str, folders: dict[str, Path]) -> None:
    """A prompt longer than the window, a decode step of two rows, and one of a single row."""
    pytest.importorskip("triton")
    tokens = torch.randint(3, VOCAB, (31,), generator=torch.Generator().manual_seed(5)).tolist()
    other = [*tokens[:3], 7, 8]
    model = PagedModel(folders[name], "float32", kernels="triton")
    first = model.run({0: tokens[:29], 1: other[:4]})
    second = model.run({0: tokens[29:30], 1: other[4:]})
    third = model.run({0: tokens[30:]})
    reference = reference_model(folders[name])
    actual = torch.cat([first[0], second[0], third[0]]).log_softmax(-1).cpu()
    torch.testing.assert_close(actual, score(reference, tokens), atol=1e-3, rtol=0)
    actual = torch.cat([first[1], second[1]]).log_softmax(-1).cpu()
    torch.testing.assert_close(actual, score(reference, other), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("name", "method"), [("gemma", "fp8"), ("gemma2", "rtn"), ("gemma3", "fp8")]
)
async def test_an_engine_that_rounds_weights_says_what_the_rounded_model_says(
    name: str, method: str, folders: dict[str, Path]
) -> None:
    rounded = reference_model(folders[name])
    layers = quantized_layers(load(folders[name], quantization=method))
    assert len(layers) == 3 * 4, "attention's two products and the MLP's, in each layer"
    with torch.no_grad():
        for layer in layers.values():
            rows = layer.rows(torch.arange(layer.spec.out_features))
            parts = rows.split(list(layer.spec.shards.values()))
            for source, part in zip(layer.spec.sources.values(), parts, strict=True):
                rounded.get_submodule(source).weight.copy_(part)
    prompt = torch.randint(3, VOCAB, (31,), generator=torch.Generator().manual_seed(5)).tolist()
    config = EngineConfig(
        model=str(folders[name]), device="cpu", dtype="float32", quantization=method,
        skip_tokenizer_init=True, max_model_len=40, max_num_seqs=2, max_num_batched_tokens=16,
        attention_backend="torch", operations="torch",
    )  # fmt: skip
    expected = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
    async with AsyncEngine(config) as engine:
        async for output in engine.generate(prompt, expected):
            last = output
    scores = score(rounded, prompt)
    for position, table in enumerate(last.prompt_logprobs[1:]):
        for token, logprob in table.items():
            assert logprob.logprob == pytest.approx(float(scores[position, token]), abs=1e-3)
    plain = score(reference_model(folders[name]), prompt)
    assert (scores - plain).abs().max() > 1e-2, "rounding is seen"


@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification"])
async def test_gemma3_is_pooled_without_a_head(kind: str, tmp_path: Path) -> None:
    """Of the others, the tests of pooling see it."""
    folder = save_decoder(
        tmp_path, "Gemma3Text", kind, head_dim=32, sliding_window=24, num_labels=3,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    tokens = torch.randint(3, VOCAB, (60,), generator=torch.Generator().manual_seed(5)).tolist()
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", runner="pooling", max_model_len=80,
        max_num_seqs=2, max_num_batched_tokens=16, attention_backend="torch",
    )  # fmt: skip
    async with AsyncEngine(config) as engine:
        actual = (await engine.encode(tokens)).outputs.data
    if kind == "Model":
        expected = F.normalize(reference_states(folder, tokens)[-1], dim=0)
    else:
        expected = reference_logits(folder, tokens).softmax(0)
    torch.testing.assert_close(torch.tensor(actual), expected, atol=1e-4, rtol=0)


async def test_capped_logits_are_no_classifier_unless_the_cap_is_taken_off(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path, "Gemma2", "ForCausalLM", head_dim=32)
    edit_json(folder / "tokenizer_config.json", unk_token="[UNK]")
    overrides = {
        "architectures": ["Gemma2ForSequenceClassification"],
        "classifier_from_token": ["cat", "dog"], "method": "from_2_way_softmax",
    }  # fmt: skip
    options = {"device": "cpu", "dtype": "float32", "runner": "pooling", "max_model_len": 80}
    with pytest.raises(ConfigError, match="final_logit_softcapping null") as caught:
        await AsyncEngine(
            EngineConfig(model=str(folder), hf_overrides=overrides, **options)
        ).start()
    assert caught.value.param == "hf_overrides"
    overrides["final_logit_softcapping"] = None
    tokens = [5, 9, 12]
    async with AsyncEngine(
        EngineConfig(model=str(folder), hf_overrides=overrides, **options)
    ) as engine:
        actual = (await engine.encode(tokens)).outputs.data
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    model = reference_model(folder)
    model.config.final_logit_softcapping = None
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, -1]
    expected = logits[[vocab["cat"], vocab["dog"]]].softmax(0)[1:]
    torch.testing.assert_close(torch.tensor(actual), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("begin", "refused"), [(2, False), (3, True)])
def test_a_stage_has_all_layers_whose_keys_its_layers_read(begin: int, refused: bool) -> None:
    """Layers 4 and 5 read those of layers 2 and 3, the last ones of their kinds before them."""
    sliding, full = "sliding_attention", "full_attention"
    hf = SimpleNamespace(
        num_hidden_layers=6, num_kv_shared_layers=2,
        layer_types=[sliding, sliding, full, sliding, sliding, full],
    )  # fmt: skip
    pipeline = Pipeline(size=2, partition=(begin, 6 - begin))
    if not refused:
        return check_stages(hf, pipeline)
    with pytest.raises(ConfigError, match=r"layers 3 to 5, which read .* layers from 2 on"):
        check_stages(hf, pipeline)
