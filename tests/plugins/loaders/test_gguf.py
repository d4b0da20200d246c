"""GGUF files written by the package: every tensor lands dequantised in its place."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from nights import some_by_day

from jackfield import EngineConfig
from jackfield.core.errors import ConfigError, LoadError
from jackfield.core.loading.build import build_model
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.loading.quantize import quantized_layers
from jackfield.core.nn.operations import Operations
from jackfield.core.registry import load_plugins

gguf = pytest.importorskip("gguf")

KIND = gguf.GGMLQuantizationType
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def random_blocks(kind: Any, rows: int, size: int) -> np.ndarray:
    """Bytes of a format that the package only reads: random numbers, scales of sensible size."""
    rng = np.random.default_rng(int(kind) + rows)
    elements, length = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * size // elements, length), dtype=np.uint8)
    scale = np.array([0.001], dtype=np.float16).view(np.uint8)
    if kind == KIND.Q4_K:
        blocks[:, 0:2] = blocks[:, 2:4] = scale
    else:
        blocks[:, -2:] = scale
    return blocks.reshape(rows, -1)


def write(family: str, folder: Path, kind: Any, **changes: Any) -> dict[str, torch.Tensor]:
    """A folder as the loader wants it; → what the file stands for, by the model's names."""
    kind_of_config = getattr(transformers, f"{family}ForCausalLM").config_class
    config = kind_of_config(**{**SIZES, **changes})
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    config.architectures = [f"{family}ForCausalLM"]
    config.save_pretrained(folder)
    name = family.lower()
    writer = gguf.GGUFWriter(folder / "model.gguf", name)
    writer.add_block_count(SIZES["num_hidden_layers"])
    arch = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[name]
    names = gguf.get_tensor_name_map(arch, SIZES["num_hidden_layers"])
    tensors = {}
    for key, parameter in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, leaf = key.rpartition(".")
        stored = parameter.numpy()
        heads = {"q_proj": 4, "k_proj": 2}.get(stem.rpartition(".")[2])
        heads = heads if name in ("llama", "granite") else None
        if heads:
            halves = stored.reshape(heads, 2, -1, stored.shape[1])
            stored = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(stored.shape)
        if stored.ndim == 2:
            if kind in (KIND.Q4_K, KIND.Q6_K):
                data = random_blocks(kind, *stored.shape)
            else:
                data = gguf.quants.quantize(stored, kind)
            writer.add_tensor(f"{names.get_name(stem)}.{leaf}", data, raw_dtype=kind)
            dense = gguf.quants.dequantize(data, kind).reshape(stored.shape)
            if heads:
                pairs = dense.reshape(heads, -1, 2, dense.shape[1])
                dense = pairs.swapaxes(1, 2).reshape(dense.shape)
            tensors[key] = torch.from_numpy(dense.copy())
        elif name.startswith("gemma"):
            parameter.normal_(std=0.3)
            writer.add_tensor(f"{names.get_name(stem)}.{leaf}", stored + 1)
            tensors[key] = parameter
        else:
            writer.add_tensor(f"{names.get_name(stem)}.{leaf}", stored)
            tensors[key] = parameter
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def load(folder: Path, **options: Any) -> Any:
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", load_format="gguf", **options
    )
    model_config = resolve_model_config(config)
    return build_model(load_plugins(), config, model_config, torch.device("cpu"), Operations())


FAMILIES = ("Llama", "Qwen3", "Granite", "Olmo2", "Phi3", "Glm4")
FORMATS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")
BY_DAY = [(family, FORMATS[number % 4]) for number, family in enumerate(FAMILIES)]


@pytest.mark.parametrize(
    ("family", "kind"), some_by_day(itertools.product(FAMILIES, FORMATS), BY_DAY)
)
def test_every_tensor_lands_in_its_place(
    family: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = write(family, tmp_path, KIND[kind])
    with caplog.at_level(logging.INFO, "jackfield.loading"):
        model = load(tmp_path)
    matrices = sum(tensor.dim() == 2 for tensor in tensors.values())
    assert "dequantised at load, and run as float32" in caplog.text
    assert f" {matrices} {kind}" in caplog.text
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for name, parameter in model.named_parameters():
        sources = [name]
        for merged, shards in parts.items():
            if merged in name and name not in tensors:
                sources = [name.replace(merged, shard) for shard in shards]
        expected = torch.cat([tensors[source] for source in sources])
        assert torch.isfinite(expected).all()
        torch.testing.assert_close(parameter.data, expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["Gemma", "Gemma2", "Gemma3"])
def test_norms_that_are_stored_whole_lose_the_one(family: str, tmp_path: Path) -> None:
    tensors = write(family, tmp_path, KIND.Q8_0, tie_word_embeddings=True)
    model = load(tmp_path)
    norms = [name for name in tensors if name.endswith("norm.weight")]
    assert len(norms) == {"Gemma": 5, "Gemma2": 9, "Gemma3": 13}[family]
    for name in norms:
        torch.testing.assert_close(model.get_parameter(name).data, tensors[name], rtol=0, atol=1e-6)
        factor = model.get_submodule(name.removesuffix(".weight")).norm.weight
        torch.testing.assert_close(factor, tensors[name] + 1, rtol=0, atol=1e-6)
    name = "model.layers.1.mlp.down_proj.weight"
    torch.testing.assert_close(model.get_parameter(name).data, tensors[name], rtol=0, atol=0)


def test_gguf_may_be_rounded_again_by_a_method(tmp_path: Path) -> None:
    write("Qwen3", tmp_path, KIND.Q8_0)
    layers = quantized_layers(load(tmp_path, quantization="rtn"))
    assert len(layers) == 2 * 4 and all(layer.processed for layer in layers.values())


def test_file_of_another_model_is_refused(tmp_path: Path) -> None:
    write("Qwen3", tmp_path, KIND.Q8_0)
    with pytest.raises(LoadError, match=r"block_count 2.*num_hidden_layers 1"):
        load(tmp_path, hf_overrides={"num_hidden_layers": 1, "layer_types": None})
    with pytest.raises(LoadError, match=r"down_proj.*\(256, 512\)"):
        load(tmp_path, hf_overrides={"intermediate_size": 256})
    (tmp_path / "model.gguf").write_bytes(b"GGUF and then nothing")
    with pytest.raises(LoadError, match=r"model.gguf is not a GGUF file"):
        load(tmp_path)
    (tmp_path / "model.gguf").unlink()
    with pytest.raises(ConfigError, match=r"load_format.*has 0"):
        load(tmp_path)
