"""Ranks compute together, from their parts of quantized weights, what one computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_compressed_tensors as packed
import test_fp8 as fp8
import test_grouped_formats as grouped
from expert_moves import check_moves

from jackfield.core.errors import ConfigError
from jackfield.core.loading.quantize import quantized_layers
from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance import quantization
from jackfield.plugins.conformance.divided_models import check_ranks
from jackfield.plugins.conformance.paged_model import PagedModel
from jackfield.plugins.conformance.rank_threads import thread_ranks

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_key_value_heads": 4,
    "num_hidden_layers": 1, "moe_intermediate_size": 384,
}  # fmt: skip
"""Three blocks of 128 inner features: one rank has two of them."""


def write(kit: Any, family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, sizes in quantization.FAMILIES.items():
        monkeypatch.setitem(quantization.FAMILIES, name, sizes | SIZES)
    kit().write(family, folder)


@pytest.mark.parametrize(
    ("kit", "family"),
    [
        (fp8.TestBlocks, "Llama"), (fp8.TestBlocks, "Qwen3Moe"), (grouped.TestGptq, "Phi3"),
        (grouped.TestAwq, "Llama"), (packed.TestW4A16Asymmetric, "Qwen3"),
    ],
)  # fmt: skip
def test_formats_of_groups_and_blocks(
    kit: Any, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(kit, family, tmp_path, monkeypatch)
    check_ranks(tmp_path, f"{family}ForCausalLM", 2, load_plugins(), 2e-3)


@pytest.mark.parametrize(
    "kit",
    [
        fp8.TestPerTensor, fp8.TestPerChannel, fp8.TestBlocks, fp8.TestRoundedAtLoad,
        grouped.TestRtn4, grouped.TestInt8, grouped.TestGptq, grouped.TestGptqSymmetric,
        grouped.TestAwq, packed.TestFp8Static, packed.TestFp8Blocks, packed.TestInt8,
        packed.TestW4A16, packed.TestW4A16Asymmetric,
    ],
)  # fmt: skip
def test_experts_are_held_whole_in_every_format(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three experts, one rank holds two. Their inner features are one block of 128, which ranks
    could not divide."""
    monkeypatch.setitem(SIZES, "moe_intermediate_size", 128)
    write(kit, "Qwen3Moe", tmp_path, monkeypatch)
    check_ranks(tmp_path, "Qwen3MoeForCausalLM", 2, load_plugins(), 2e-3, ways=("experts",))
    if kit is packed.TestFp8Static:
        with pytest.raises(ConfigError, match="does not store it by expert"):
            check_moves(tmp_path, 1)
    else:
        check_moves(tmp_path, 1, quantization=kit.name)


def test_blocks_of_inner_features_stay_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(fp8.TestBlocks, "Llama", tmp_path, monkeypatch)
    models = [PagedModel(tmp_path, "float32", ranks=ranks).model for ranks in thread_ranks(2)]
    layers = [quantized_layers(model)["model.layers.0.mlp.down_proj"] for model in models]
    assert [layer.spec.in_features for layer in layers] == [256, 128]


def test_rows_of_a_rank_may_end_within_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two key heads of 64 channels are one block."""
    monkeypatch.setitem(SIZES, "num_key_value_heads", 2)
    write(fp8.TestBlocks, "Llama", tmp_path, monkeypatch)
    check_ranks(tmp_path, "LlamaForCausalLM", 2, load_plugins(), 2e-3)


def test_columns_in_another_order_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(grouped.TestGptqActOrder, "Llama", tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"checkpoint mixes them: .*o_proj") as caught:
        PagedModel(tmp_path, "float32", ranks=thread_ranks(2)[0])
    assert caught.value.param == "tensor_parallel_size"


def test_more_ranks_than_blocks_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(fp8.TestBlocks, "Llama", tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"stores 128 together") as caught:
        PagedModel(tmp_path, "float32", ranks=thread_ranks(4)[0])
    assert caught.value.param == "tensor_parallel_size"
