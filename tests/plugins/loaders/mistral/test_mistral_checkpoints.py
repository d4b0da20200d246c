"""Checkpoints in Mistral's own files say what `transformers` says of the model that they were
written from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tekken_files import SPECIALS, write_tekken

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, LoadError
from jackfield.core.loading import checkpoint_config
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.registry import load_plugins
from jackfield.core.text.tokenizer import Tokenizer
from jackfield.plugins.conformance.paged_model import PagedModel
from jackfield.plugins.loaders.mistral.params import config_of

VOCAB = 400
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "initializer_range": 0.2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
PARAMS: dict[str, Any] = {
    "dim": 64, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "hidden_dim": 96,
    "norm_eps": 1e-5, "vocab_size": VOCAB, "max_seq_len": 256,
}  # fmt: skip
DENSE = {"head_dim": HEAD_DIM}
ROPE = {"rope_type": "default"}
YARN = {"factor": 8.0, "original_max_position_embeddings": 32, "beta": 32, "alpha": 1}
HF_YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0,
    "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
PROMPT = [1, *range(100, 148)]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": (
        "Mistral",
        DENSE | {"sliding_window": None, "rope_parameters": ROPE | {"rope_theta": 5e3}},
        DENSE | {"rope_theta": 5e3},
    ),
    "window": (
        "Mistral",
        DENSE | {"sliding_window": 12, "rope_parameters": ROPE | {"rope_theta": 1e4}},
        DENSE | {"sliding_window": 12},
    ),
    "tied, scaled": (
        "Mistral",
        DENSE | {"sliding_window": None, "rope_parameters": HF_YARN, "tie_word_embeddings": True},
        DENSE | {"yarn": YARN, "rope_theta": 5000.0, "tied_embeddings": True},
    ),
    "windows in turn": (
        "Ministral",
        DENSE | {
            "sliding_window": 12, "rope_parameters": ROPE | {"rope_theta": 1e6},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        DENSE | {"sliding_window": [12, None], "rope_theta": 1e6},
    ),
    "growing": (
        "Ministral3",
        DENSE | {"rope_parameters": HF_YARN | {
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4,
        }},
        DENSE | {
            "yarn": YARN | {"apply_scale": False}, "rope_theta": 5000.0,
            "llama_4_scaling": {"beta": 0.4, "original_max_position_embeddings": 32},
        },
    ),
    "mixture": (
        "Mixtral",
        DENSE | {
            "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
            "rope_parameters": ROPE | {"rope_theta": 1e6},
        },
        DENSE | {"moe": {"num_experts": 4, "num_experts_per_tok": 2}},
    ),
    "latent": (
        "Mistral4",
        LATENT | {
            "num_key_value_heads": HEADS, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
            "rope_parameters": HF_YARN | {
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4,
            },
        },
        LATENT | {
            "n_kv_heads": HEADS, "yarn": YARN, "rope_theta": 5000.0, "llama_4_scaling": {
                "beta": 0.4, "original_max_position_embeddings": 32,
            },
            "moe": {
                "num_experts": 8, "num_experts_per_tok": 2, "expert_hidden_dim": 48,
                "num_shared_experts": 1, "first_k_dense_replace": 1, "route_every_n": 1,
                "num_expert_groups": 1, "num_expert_groups_per_tok": 1, "routed_scale": 2.5,
            },
        },
    ),
}  # fmt: skip
"""What it shows → the class and its fields, and what params.json says."""
MLA = CASES["latent"][1]
CASES["latent, unscaled"] = (
    "Mistral4",
    MLA | {"rope_parameters": MLA["rope_parameters"] | {
        "attention_factor": 1.0, "mscale_all_dim": 0.0,
    }},
    CASES["latent"][2] | {"yarn": YARN | {"apply_scale": False}},
)  # fmt: skip
RENAMED = (
    (r"^model\.", ""), (r"embed_tokens", "tok_embeddings"), (r"^lm_head", "output"),
    (r"\.mlp\.(gate|experts|shared_experts)\.", r".\1."), (r"block_sparse_moe", "feed_forward"),
    (r"self_attn", "attention"), (r"\.mlp\.", ".feed_forward."),
    (r"q_([ab])_proj", r"wq_\1"), (r"kv_a_proj_with_mqa", "wkv_a_with_mqa"),
    (r"kv_b_proj", "wkv_b"), (r"(q|kv)_a_layernorm", r"\1_a_norm"), (r"([qkvo])_proj", r"w\1"),
    (r"gate_proj", "w1"), (r"down_proj", "w2"), (r"up_proj", "w3"),
    (r"input_layernorm", "attention_norm"), (r"post_attention_layernorm", "ffn_norm"),
)  # fmt: skip


def model_of(case: str) -> Any:
    name, fields, _ = CASES[case]
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**SIZES | fields)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def own_tensors(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors by Mistral's names, in its order, with one that images are read with."""
    model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / file).unlink()
    tensors = {"vision_encoder.ln_pre.weight": torch.ones(4)}
    for name, tensor in saved.items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            start, _, part = name.rpartition(".")
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            for expert, rows in enumerate(tensor):
                for each, piece in zip(names, rows.chunk(len(names)), strict=True):
                    tensors[renamed(f"{start}.{expert}.{each}.weight")] = piece.contiguous()
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = tensor.reshape(-1, 2, HEAD_DIM // 2, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape).contiguous()
        tensors[renamed(name)] = tensor
    return tensors


def renamed(name: str) -> str:
    for pattern, new in RENAMED:
        name = re.sub(pattern, new, name)
    return name


def write(folder: Path, tensors: Mapping[str, torch.Tensor], params: Mapping[str, Any]) -> None:
    save_file(dict(tensors), folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps(PARAMS | params))


def checkpoint(folder: Path, case: str, **params: Any) -> Any:
    """Write a checkpoint, and return the model of `transformers`."""
    model = model_of(case)
    write(folder, own_tensors(model, folder), CASES[case][2] | params)
    return model


@torch.no_grad()
def score(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_equals_transformers(case: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path, case)
    got = PagedModel(tmp_path, "float32").run({0: PROMPT})[0].log_softmax(-1).cpu()
    torch.testing.assert_close(got, score(model, PROMPT), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("version", "reasoning"), [("v11", None), ("v13", "mistral")])
async def test_the_whole_engine_starts_on_it(
    version: str, reasoning: str | None, tmp_path: Path
) -> None:
    """Tokens of a text and of a chat, parsers that are found, and what the model says."""
    model = checkpoint(tmp_path, "dense")
    write_tekken(tmp_path, version)
    config = EngineConfig(
        model=str(tmp_path), dtype="float32", tool_call_parser="auto", reasoning_parser="auto",
        max_model_len=64, num_gpu_blocks_override=32, block_size=16,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    async with AsyncEngine(config) as engine:
        parsers = engine.config.tool_call_parser, engine.config.reasoning_parser
        assert parsers == ("mistral", reasoning)
        *_, output = [output async for output in engine.generate("Hello, Paris", params)]
    prompt, [completion] = output.prompt_token_ids, output.outputs
    assert prompt[0] == 1 and min(prompt[1:]) >= SPECIALS
    expected = score(model, prompt + completion.token_ids)[len(prompt) - 1 : -1]
    for row, token, logprobs in zip(
        expected, completion.token_ids, completion.logprobs, strict=True
    ):
        assert float(row.max() - row[token]) <= 1e-3
        assert logprobs[token].logprob == pytest.approx(float(row[token]), abs=1e-3)


def test_scales_of_float8_weights_are_found(tmp_path: Path) -> None:
    """Against the numbers that the stored ones stand for, in a checkpoint without quantization."""
    tensors = own_tensors(model_of("dense"), tmp_path)
    stored, plain = dict(tensors), dict(tensors)
    for name in tensors:
        if re.search(r"\.w[qkvo123]\.weight$", name):
            start, scale = name.removesuffix("weight"), tensors[name].abs().amax() / 448
            stored[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
            stored[f"{start}qscale_weight"] = scale
            stored[f"{start}qscale_act"] = torch.tensor(0.05)
            plain[name] = stored[name].float() * scale
    dense = CASES["dense"][2]
    outputs = []
    for scheme, written in (("TENSOR", stored), ("NO_SCALES", stored), (None, plain)):
        quantization = {"qformat_weight": "fp8_e4m3", "qscheme_act": scheme}
        write(tmp_path, written, dense | ({"quantization": quantization} if scheme else {}))
        outputs.append(PagedModel(tmp_path, "float32").run({0: PROMPT})[0].cpu())
    *rounded, exact = outputs
    for logits in rounded:
        assert torch.cosine_similarity(logits, exact).min() > 0.98


def test_files_of_transformers_come_first(tmp_path: Path) -> None:
    checkpoint(tmp_path, "dense")
    config = EngineConfig(model=str(tmp_path), device="cpu")
    plugins = load_plugins()
    assert resolve_model_config(config, plugins).load_format == "mistral"
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES,
    }))  # fmt: skip
    found = resolve_model_config(config, plugins)
    assert (found.architecture, found.load_format) == ("LlamaForCausalLM", "safetensors")
    named = EngineConfig(model=str(tmp_path), device="cpu", config_format="mistral")
    assert resolve_model_config(named, plugins).architecture == "MistralForCausalLM"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dim": None}, "dim must be an integer"),
        ({"model_type": "mamba"}, "model_type must be transformer"),
        ({"sliding_window": [4, 8]}, "sliding_window must be"),
        ({"sliding_window": "4"}, "sliding_window must be"),
        ({"sliding_window": [{}, None]}, "sliding_window must be"),
        ({"sliding_window": {"size": 4}}, "sliding_window must be"),
        ({"n_layers": 0}, "n_layers must be an integer from 1 to 10000"),
        ({"n_layers": 10**12}, "n_layers must be an integer from 1 to 10000"),
        ({"n_kv_heads": -1}, "n_kv_heads must be an integer from 1 to"),
        ({"kv_lora_rank": 2**31}, "kv_lora_rank must be an integer from 1 to"),
        ({"yarn": {**YARN, "beta": -1}}, r"yarn\.beta must be positive"),
        ({"sliding_window": [4, None], "moe": {"num_experts": 2, "num_experts_per_tok": 1}},
         "in some layers"),
        ({"moe": {"num_experts": 2}}, r"moe\.num_experts_per_tok must be"),
        ({"yarn": {"factor": 2.0}}, r"yarn\.original_max_position_embeddings must be"),
        ({"yarn": {**YARN, "gamma": 1}}, r"yarn\.gamma is not supported"),
        ({"llama_4_scaling": {"beta": 0.1}}, r"llama_4_scaling\.original_max_position_embeddings"),
        ({"qk_nope_head_dim": 8}, "without moe"),
        ({"quantization": {"qformat_weight": "int4"}}, r"quantization\.qformat_weight must be"),
        ({"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "ROW"}},
         r"quantization\.qscheme_act must be"),
    ],
)  # fmt: skip
def test_fields_are_refused_by_name(params: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | DENSE | params))
    with pytest.raises(ConfigError, match=rf"params\.json.*{message}"):
        resolve_model_config(EngineConfig(model=str(tmp_path), device="cpu"), load_plugins())


def test_compressed_tensors_say_themselves_how_they_are_stored(tmp_path: Path) -> None:
    given = {"quant_method": "compressed_tensors", "config_groups": {}}
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | DENSE | {"quantization": given}))
    found = resolve_model_config(EngineConfig(model=str(tmp_path), device="cpu"), load_plugins())
    assert found.quantization_config == given | {"quant_method": "compressed-tensors"}


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path), device="cpu")
    with pytest.raises(LoadError, match=r"no config\.json or params\.json"):
        resolve_model_config(config, load_plugins())
    (tmp_path / "params.json").write_text("{")
    with pytest.raises(LoadError, match=r"params\.json cannot be read"):
        resolve_model_config(config, load_plugins())
    config = EngineConfig(model=str(tmp_path), device="cpu", config_format="other")
    with pytest.raises(ConfigError, match=r"no checkpoint format named 'other'") as caught:
        resolve_model_config(config, load_plugins())
    assert caught.value.param == "config_format"
    formats = load_plugins()["checkpoint_format"]
    with pytest.raises(ConfigError, match=r"no checkpoint format named 'other'") as caught:
        Tokenizer.load(str(tmp_path), formats=formats, mode="other")
    assert caught.value.param == "tokenizer_mode"


def test_a_tensor_under_both_of_its_names_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, "dense")
    file = tmp_path / "consolidated.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.norm.weight": tensors["norm.weight"] + 1}, file)
    with pytest.raises(LoadError, match=r"norm\.weight and .*norm\.weight are the same"):
        PagedModel(tmp_path, "float32")


def test_loading_imports_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path, "dense")
    monkeypatch.delattr(checkpoint_config, "_whole")
    PagedModel(tmp_path, "float32")


def test_a_format_that_was_asked_for_is_the_one_that_is_missed(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | DENSE))
    config = EngineConfig(model=str(tmp_path), device="cpu", config_format="hf")
    with pytest.raises(LoadError, match=r"has no config\.json$"):
        resolve_model_config(config, load_plugins())
    formats = load_plugins()["checkpoint_format"]
    with pytest.raises(LoadError, match=r"has no tekken\.json"):
        Tokenizer.load(str(tmp_path), formats=formats, mode="mistral")


@pytest.mark.parametrize("longer", ["max_seq_len", "max_position_embeddings"])
def test_of_two_lengths_the_shorter_is_the_context(longer: str, tmp_path: Path) -> None:
    params = {**PARAMS, **DENSE, "max_seq_len": 64, "max_position_embeddings": 64, longer: 256}
    (tmp_path / "params.json").write_text(json.dumps(params))
    assert config_of(tmp_path)["max_position_embeddings"] == 64
