"""Formats with a scale for each group of columns, written here by their published layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from through_triton import ThroughTriton

from jackfield.core.errors import ConfigError, LoadError
from jackfield.core.loading.quantize import quantized_layers
from jackfield.plugins.conformance.quantization import QuantizationKit
from jackfield.plugins.quantization.awq import Awq


def round_asymmetric(weight: torch.Tensor, bits: int, group: int, symmetric: bool = False) -> Any:
    """[N, K] → (numbers [N, K], scales [G, N], zeros [G, N], what they stand for)"""
    rows, size = weight.shape
    wide = weight.view(rows, size // group, group)
    most = (1 << bits) - 1
    if symmetric:
        scale = wide.abs().amax(dim=2).clamp(min=1e-8) * 2 / most
        zero = torch.full_like(scale, (most + 1) // 2)
    else:
        low, high = wide.amin(dim=2).clamp(max=0), wide.amax(dim=2).clamp(min=0)
        scale = ((high - low) / most).clamp(min=1e-8)
        zero = (-low / scale).round()
    numbers = (wide / scale[:, :, None] + zero[:, :, None]).round().clamp(0, most)
    dequantised = (numbers - zero[:, :, None]) * scale[:, :, None]
    flat = (part.reshape(rows, size) for part in (numbers, dequantised))
    numbers, dequantised = flat
    return numbers.int(), scale.t(), zero.t().int(), dequantised


def pack(numbers: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """[M, n] → [M, n * bits / 32] int32; neighbours from the low bits up, or at `places`."""
    per_word = 32 // bits
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // per_word, dtype=torch.int64)
    for i in range(per_word):
        place = i if places is None else places.index(i)
        words |= numbers[:, i::per_word].long() << (bits * place)
    return words.to(torch.int32)


class TestRtn4(QuantizationKit):
    name = "rtn"
    config = {"bits": 4, "group_size": 32}
    mismatched = {"bits": 5, "group_size": 12, "lm_head": "yes", "modules_to_not_convert": 3}
    ignore_field = "modules_to_not_convert"

    def quantize(self, weight: torch.Tensor) -> Any:
        rows, size = weight.shape
        group = self.config.get("group_size", 128)
        group = size if group == -1 else group
        bits = self.config.get("bits", 8)
        half = 1 << (bits - 1)
        wide = weight.view(rows, size // group, group)
        scale = wide.abs().amax(dim=2, keepdim=True) * 2 / (2 * half - 1)
        scale[scale == 0] = 1.0
        numbers = (wide / scale).round().clamp(-half, half - 1)
        return {"weight": weight}, (numbers * scale).reshape(rows, size)


class TestRtn8(TestRtn4):
    config = {"bits": 8, "group_size": -1}
    rounding = 0.01


class TestRtnByName(TestRtn4):
    """`--quantization rtn` alone."""

    config = {}
    mismatched = {}
    rounding = 0.01


class TestRtnWithHead(TestRtn4):
    config = {"bits": 4, "group_size": 64, "lm_head": True}
    # A head as coarse as this changes logits as much as a layer: the bound is the same.

    def is_quantized(self, layer: str) -> bool:
        return layer == "lm_head" or super().is_quantized(layer)


class TestRtnThroughTriton(ThroughTriton, TestRtn4):
    # A GPU divides a little differently, so a number near a tie may go to the next step, of 1/7.
    exact = 0.15 if torch.cuda.is_available() else 1e-4

    @pytest.fixture(scope="class", params=["Llama"])
    @classmethod
    def family(cls, request: pytest.FixtureRequest) -> str:
        return str(request.param)


def test_tied_embeddings_can_be_rounded(tmp_path: Path) -> None:
    """Looked-up rows and logits come from the same packed table."""
    import json

    kit = TestRtn4()
    kit.write("Qwen3", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    kit.set_config(tmp_path, embeddings=True)
    model = kit.build(tmp_path)
    table: Any = model.get_submodule("model.embed_tokens")
    dense = table.layer.forward(torch.eye(128)).t()
    ids = torch.tensor([5, 0, 159])
    torch.testing.assert_close(table(ids), dense[ids])
    hidden = torch.randn(3, 128)
    torch.testing.assert_close(table.logits(hidden), hidden @ dense.t())
    assert quantized_layers(model)["model.embed_tokens"].spec.role == "embedding"


class TestInt8(QuantizationKit):
    name = "int8"
    mismatched = {"lm_head": 1, "modules_to_not_convert": [4]}
    rounding = 0.02

    def quantize(self, weight: torch.Tensor) -> Any:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        scale[scale == 0] = 1.0
        return {"weight": weight}, (weight / scale).round() * scale


class TestNameAlone(QuantizationKit):
    """What an outsider checks from the shell, nothing written."""

    name = "int8"


class TestNameOfAFormatAlone(QuantizationKit):
    """Skipped, with the reason: a format needs a configuration."""

    name = "gptq"

    def test_the_reason_names_the_field(self) -> None:
        with pytest.raises(pytest.skip.Exception, match=r"quantization_config\.bits"):
            self.quantize(torch.ones(8, 8))


class TestGptq(QuantizationKit):
    name = "gptq"
    config = {"bits": 4, "group_size": 32, "sym": False, "desc_act": False}
    mismatched: ClassVar[Any] = {
        "bits": 3,
        "group_size": "wide",
        "sym": "maybe",
        "checkpoint_format": "marlin",
        "dynamic": {"-:(": {}},
    }
    ignore_field = "modules_to_not_convert"
    version_offset = 1

    def quantize(self, weight: torch.Tensor) -> Any:
        bits, size = self.config["bits"], weight.shape[1]
        group = size if self.config["group_size"] == -1 else self.config["group_size"]
        order = torch.arange(size)
        if self.config["desc_act"]:
            # By falling size of the input's activations: the same for all layers over one input.
            order = torch.randperm(size, generator=torch.Generator().manual_seed(size))
        numbers, scales, zeros, dequantised = round_asymmetric(
            weight[:, order], bits, group, self.config["sym"]
        )
        back = order.argsort()
        stored = (zeros - self.version_offset) & ((1 << bits) - 1)
        tensors = {
            "qweight": _pack_columns(numbers[:, back], bits),
            "qzeros": pack(stored, bits),
            "scales": scales,
            "g_idx": (back // group).int(),
        }
        return tensors, dequantised[:, back]


def _pack_columns(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """[N, K] → [K * bits / 32, N]: neighbouring columns share a word."""
    return pack(numbers, bits).t()


class TestGptqSymmetric(TestGptq):
    config = {"bits": 8, "group_size": 64, "sym": True, "desc_act": False}
    rounding = 0.01


class TestGptqActOrder(TestGptq):
    config = {
        "bits": 4, "group_size": 32, "sym": True, "desc_act": True, "checkpoint_format": "gptq_v2",
    }  # fmt: skip
    version_offset = 0

    def test_different_orders_in_a_merged_layer_are_refused(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        self.write("Llama", tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        name = "model.layers.0.self_attn.k_proj.g_idx"
        tensors[name] = tensors[name].flip(0).contiguous()
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(LoadError, match=r"qkv_proj.*g_idx"):
            self.build(tmp_path)


class TestGptqRules(TestGptq):
    """GPTQModel's `dynamic`: one layer left out, one with other bits."""

    config = {
        "bits": 4, "group_size": 32, "sym": False, "desc_act": False,
        "dynamic": {r"-:.*layers\.0\.self_attn\.o_proj": {}, r"+:.*lm_head": {"bits": 8}},
        "lm_head": False,
    }  # fmt: skip
    ignore_field = None
    inert = frozenset({r"dynamic.+:.*lm_head.bits"})
    """The head is not quantized."""

    def is_quantized(self, layer: str) -> bool:
        return "layers.0.self_attn.o_proj" not in layer and super().is_quantized(layer)

    def test_norm_before_and_residual_after(self, checkpoint: Any) -> None:
        layers = quantized_layers(self.build(checkpoint[0]))
        assert "model.layers.0.self_attn.o_proj" not in layers
        assert "model.layers.1.self_attn.o_proj" in layers


class TestAwq(QuantizationKit):
    name = "awq"
    config = {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    mismatched = {"bits": 8, "version": "gemv", "zero_point": 2, "group_size": 0}
    ignore_field = "modules_to_not_convert"

    def quantize(self, weight: torch.Tensor) -> Any:
        numbers, scales, zeros, dequantised = round_asymmetric(weight, 4, 32)
        places = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": pack(numbers.t(), 4, places),
            "qzeros": pack(zeros, 4, places),
            "scales": scales,
        }
        return tensors, dequantised


def test_what_an_awq_checkpoint_does_not_say() -> None:
    method = Awq.from_config({"quant_method": "awq", "bits": 4})
    assert method.zeros and method.group_size == 128 and not method.ignored
    assert not Awq.from_config({"bits": 4, "zero_point": False}).zeros


def test_a_method_other_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    kit = TestAwq()
    kit.write("Llama", tmp_path)
    with pytest.raises(ConfigError, match=r"'rtn'.*'awq'") as caught:
        kit.build(tmp_path, quantization="rtn")
    assert caught.value.param == "quantization"
    assert quantized_layers(kit.build(tmp_path, quantization="awq_marlin"))


def test_a_list_that_splits_a_merged_layer_is_refused(tmp_path: Path) -> None:
    kit = TestAwq()
    kit.write("Llama", tmp_path)
    kit.set_config(tmp_path, modules_to_not_convert=["q_proj"])
    with pytest.raises(ConfigError, match=r"q_proj but not .*k_proj") as caught:
        kit.build(tmp_path)
    assert caught.value.param == "quantization_config.modules_to_not_convert"
