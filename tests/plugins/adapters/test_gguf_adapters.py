"""GGUF adapters written by the package `gguf`, as llama.cpp's converter lays them out."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters_made import LINEAR, make_adapter

from jackfield import EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.core.loading.build import build_model
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.nn.operations import Operations
from jackfield.core.registry import load_plugins
from jackfield.core.worker.adapters.sites import Sites
from jackfield.plugins.adapters.gguf import GgufFormat
from jackfield.plugins.adapters.peft import PeftFormat

from helpers import make_checkpoint, reference_model

gguf = pytest.importorskip("gguf")

KIND = gguf.GGMLQuantizationType


def write(
    path: Path,
    tensors: dict[str, torch.Tensor],
    *,
    architecture: str = "llama",
    kind: Any = KIND.F32,
    alpha: float | None = 6.0,
    **fields: Any,
) -> Path:
    """Write an adapter: tensors by GGUF's names, in the order of numpy."""
    writer = gguf.GGUFWriter(path, architecture)
    texts = {"general.type": "adapter", "adapter.type": "lora", **fields}
    tokens = texts.pop("tokens", None)
    for key, text in texts.items():
        if text is not None:
            writer.add_string(key, text)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    if tokens is not None:
        types = (gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32)
        writer.add_key_value("adapter.alora.invocation_tokens", tokens, *types)
    for name, tensor in tensors.items():
        data = gguf.quants.quantize(tensor.contiguous().numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(adapter: Path, architecture: str) -> dict[str, torch.Tensor]:
    """Return a PEFT adapter's tensors by the names that the package has, as they are."""
    arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(arch, 3)
    tensors = {}
    for change in PeftFormat.read(adapter).low_rank:
        name = f"{names.get_name(change.name)}.weight"
        a = change.a().t() if change.embedding else change.a()
        tensors |= {f"{name}.lora_a": a, f"{name}.lora_b": change.b()}
    return tensors


FAMILIES = {
    "qwen2": ("qwen2", LINEAR), "qwen3": ("qwen3", ["q_proj", "embed_tokens", "lm_head"]),
    "gemma2": ("gemma2", LINEAR), "olmo2": ("olmo2", LINEAR),
    "phi3": ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
    "glm4": ("glm4", ["q_proj", "gate_up_proj", "down_proj"]),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_has_the_checkpoints_name(family: str, tmp_path: Path) -> None:
    architecture, targets = FAMILIES[family]
    model = reference_model(make_checkpoint(family, tmp_path / "model"))
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=targets)
    file = write(tmp_path / "a.gguf", converted(adapter, architecture), architecture=architecture)
    # Equal in all that is computed, so equal in their digests.
    assert GgufFormat.read(file).digest == PeftFormat.read(adapter).digest


def two(name: str = "blk.1.ffn_down.weight") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        f"{name}.lora_a": torch.randn((2, 96), generator=generator),
        f"{name}.lora_b": torch.randn((64, 2), generator=generator),
    }


@pytest.mark.parametrize(("alpha", "scale"), [(6.0, 3.0), (0.0, 1.0), (None, 1.0), (1.5, 0.75)])
def test_alpha_is_that_of_llama_cpp(alpha: float | None, scale: float, tmp_path: Path) -> None:
    (change,) = GgufFormat.read(write(tmp_path / "a.gguf", two(), alpha=alpha)).low_rank
    assert (change.name, change.scale) == ("model.layers.1.mlp.down_proj", scale)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_types_that_the_converter_writes_are_read(kind: str, tmp_path: Path) -> None:
    data = two()
    # The converter leaves what is no multiple of a block in another type.
    data["blk.1.ffn_down.weight.lora_b"] = torch.randn(64, 32)
    data["blk.1.ffn_down.weight.lora_a"] = torch.randn(32, 96)
    (change,) = GgufFormat.read(write(tmp_path / "a.gguf", data, kind=KIND[kind])).low_rank
    for read, name in ((change.a, "lora_a"), (change.b, "lora_b")):
        stored = gguf.quants.quantize(data[f"blk.1.ffn_down.weight.{name}"].numpy(), KIND[kind])
        expected = gguf.quants.dequantize(stored, KIND[kind])
        np.testing.assert_array_equal(read().float().numpy(), expected)


def test_queries_and_keys_of_llama_say_that_they_are_pairs(tmp_path: Path) -> None:
    tensors = {**two("blk.0.attn_q.weight"), **two("blk.0.attn_k.weight"), **two()}
    pairs = {
        each.name: each.pairs
        for each in GgufFormat.read(write(tmp_path / "a.gguf", tensors)).low_rank
    }
    assert pairs == {
        "model.layers.0.self_attn.q_proj": True,
        "model.layers.0.self_attn.k_proj": True,
        "model.layers.1.mlp.down_proj": False,
    }


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_pairs_become_the_rows_of_the_model(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path / "model")
    adapter = make_adapter(folder, tmp_path / "adapter", target_modules=LINEAR)
    tensors = converted(adapter, family)
    for name, tensor in tensors.items():
        if name.endswith(("attn_q.weight.lora_b", "attn_k.weight.lora_b")):
            # As the converter has them: heads of 16 channels, halves made pairs.
            halves = tensor.reshape(-1, 2, 8, tensor.shape[1])
            tensors[name] = halves.transpose(1, 2).reshape(tensor.shape)
    file = write(tmp_path / "a.gguf", tensors, architecture=family)
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", load_format="dummy")
    model = build_model(
        load_plugins(), config, resolve_model_config(config), torch.device("cpu"), Operations()
    )
    sites = Sites(model)
    for site in sites.sites.values():
        site.called = True  # As after a step.
    expected = sites.changes(PeftFormat.read(adapter))
    changes = sites.changes(GgufFormat.read(file))
    assert changes.keys() == expected.keys()
    for key, change in changes.items():
        for piece, other in zip(change.pieces, expected[key].pieces, strict=True):
            assert piece.span == other.span
            assert torch.equal(piece.b @ piece.a, other.b @ other.a), key
    file_twice = dataclasses.replace(
        (once := PeftFormat.read(adapter)), low_rank=(*once.low_rank, once.low_rank[0])
    )
    with pytest.raises(ConfigError, match="twice, under two names"):
        sites.changes(file_twice)


def test_experts_are_layers_of_their_own(tmp_path: Path) -> None:
    a, b = torch.randn(4, 2, 64), torch.randn(4, 96, 2)
    name = "blk.2.ffn_up_exps.weight"
    file = write(
        tmp_path / "a.gguf", {f"{name}.lora_a": a, f"{name}.lora_b": b}, architecture="qwen3moe"
    )
    changes = GgufFormat.read(file).low_rank
    assert [each.name for each in changes] == [
        f"model.layers.2.mlp.experts.{expert}.up_proj" for expert in range(4)
    ]
    for expert, each in enumerate(changes):
        assert torch.equal(each.a(), a[expert]) and torch.equal(each.b(), b[expert])


def test_invocation_tokens_and_notes(tmp_path: Path) -> None:
    fields = {"tokens": [5, 9], "adapter.lora.prompt_prefix": "Hello"}
    file = GgufFormat.read(write(tmp_path / "a.gguf", two(), **fields))
    assert file.invocation_tokens == (5, 9)
    assert any("prompt_prefix" in note for note in file.notes)


def test_a_folder_with_one_file_is_an_adapter(tmp_path: Path) -> None:
    assert not GgufFormat.is_at(tmp_path)
    file = write(tmp_path / "a.gguf", two())
    assert GgufFormat.is_at(tmp_path) and GgufFormat.is_at(file)
    assert GgufFormat.read(tmp_path).digest == GgufFormat.read(file).digest


NAN = {**two(), "blk.1.ffn_down.weight.lora_a": torch.full((2, 96), torch.nan)}
REFUSED: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]] = {
    "a model": (two(), {"general.type": "model"}, "general.type"),
    "no LoRA": (two(), {"adapter.type": "other"}, "adapter.type"),
    "architecture": (two(), {"architecture": "gpt2"}, "general.architecture"),
    "alpha": (two(), {"alpha": float("nan")}, "adapter.lora.alpha"),
    "nothing": ({}, {}, "a.gguf"),
    "one half": (
        {"blk.0.attn_q.weight.lora_a": torch.ones(2, 4)}, {}, "blk.0.attn_q.weight.lora_a",
    ),
    "norm": (
        {**two(), "blk.0.attn_norm.weight": torch.ones(4)}, {}, "blk.0.attn_norm.weight",
    ),
    "unknown layer": (two("blk.0.other.weight"), {}, "blk.0.other.weight"),
    "ranks": (
        {**two(), "blk.1.ffn_down.weight.lora_b": torch.ones(64, 3)}, {}, "blk.1.ffn_down.weight",
    ),
    "experts": (two("blk.1.ffn_down_exps.weight"), {}, "blk.1.ffn_down_exps.weight"),
    "NaN": (NAN, {}, "model.layers.1.mlp.down_proj: A"),
    "tokens": (two(), {"tokens": [1 << 31]}, "adapter.alora.invocation_tokens"),
    "embedding and tokens": (
        {"token_embd.weight.lora_a": torch.ones(9, 2),
         "token_embd.weight.lora_b": torch.ones(4, 2)},
        {"tokens": [5]}, "adapter.alora.invocation_tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_named(case: str, tmp_path: Path) -> None:
    tensors, fields, param = REFUSED[case]
    file = write(tmp_path / "a.gguf", tensors, **fields)
    with pytest.raises(ConfigError) as caught:
        GgufFormat.read(file)
    assert caught.value.param == param


def key(kind: int, value: bytes) -> bytes:
    return struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", kind) + value


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"GGUF", id="short"),
        pytest.param(struct.pack("<4sIQQ", b"GGUF", 9, 0, 0), id="version"),
        pytest.param(struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0), id="tensors without end"),
        pytest.param(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60), id="keys without end"),
        pytest.param(key(9, struct.pack("<IQ", 0, 1 << 60)), id="array without end"),
        pytest.param(key(9, struct.pack("<IQ", 8, 1 << 17)), id="texts without end"),
        pytest.param(key(9, struct.pack("<IQ", 9, 1) * 9), id="arrays of arrays"),
        pytest.param(key(8, struct.pack("<Q", 1 << 62)), id="text without end"),
        pytest.param(key(77, b""), id="unknown type"),
        pytest.param(key(8, struct.pack("<Q", 2) + b"\xff\xff"), id="no UTF-8"),
        pytest.param(
            struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 1 << 62, 0, 0) + bytes(99),
            id="tensor without end",
        ),
    ],
)
def test_a_file_of_another_form_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        GgufFormat.read(tmp_path / "a.gguf")
    assert caught.value.param == "a.gguf"
