"""MiMo-V2.5's queries, keys and values: one float8 tensor in chunks, whose blocks of factors begin
anew with each chunk, and end within keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import PROMPTS
from test_renamed_families import CASES, score, write

from jackfield.core.errors import ConfigError, LoadError
from jackfield.plugins.conformance.divided_models import check_ranks
from jackfield.plugins.conformance.kit import Kit
from jackfield.plugins.conformance.paged_model import PagedModel
from jackfield.plugins.models.mimo_v2 import BLOCK, FusedWeightMap

NAME = "MiMoV2ForCausalLM"
CHUNKS, QUERIES, KEYS, SIZE, VALUES = 2, 8, 4, 24, 16
"""Sizes of a layer with windows. A chunk is 96 rows of queries, 48 of keys and 32 of values."""
SIZES = {
    "num_attention_heads": QUERIES, "head_dim": SIZE, "v_head_dim": VALUES,
    "num_key_value_heads": CHUNKS,
}  # fmt: skip
PROJECTION = "self_attn.qkv_proj.weight"
QUANTIZED = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
}  # fmt: skip


def rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """→ float8, factors of blocks of rows (there is one block of columns), and what they say"""
    blocks = [part.abs().max() / 448.0 for part in rows.split(BLOCK)]
    factors = torch.stack(blocks)[:, None]
    spread = factors.repeat_interleave(BLOCK, 0)[: len(rows)]
    values = (rows / spread).to(torch.float8_e4m3fn)
    return values, factors, values.float() * spread


def chunked(fused: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[queries, keys, values] → float8 chunks, their factors, and what they say, in order."""
    parts = fused.split([QUERIES * SIZE, keys * SIZE, keys * VALUES])
    chunks = [rounded(torch.cat(some)) for some in zip(*(p.chunk(CHUNKS) for p in parts),
                                                       strict=True)]  # fmt: skip
    values, factors, said = zip(*chunks, strict=True)
    sizes = [len(part) // CHUNKS for part in parts]
    in_order = zip(*(chunk.split(sizes) for chunk in said), strict=True)
    stored = torch.cat([chunk.view(torch.uint8) for chunk in values]).view(torch.float8_e4m3fn)
    return stored, torch.cat(factors), torch.cat([torch.cat(part) for part in in_order])


def write_rounded(folder: Path) -> Any:
    """Write a checkpoint whose fused projections are float8; return its equal."""
    case = CASES[NAME]
    case = case._replace(fields=case.fields | SIZES, config=case.config | SIZES | {
        "swa_num_attention_heads": QUERIES, "swa_num_key_value_heads": KEYS,
        "swa_head_dim": SIZE, "swa_v_head_dim": VALUES, "quantization_config": QUANTIZED,
    })  # fmt: skip
    reference = write(case, NAME, folder)
    file = folder / "model.safetensors"
    found, state = {}, reference.state_dict()
    for name, tensor in load_file(file).items():
        if not name.endswith(PROJECTION):
            found[name] = tensor
            continue
        keys = KEYS if ".1." in name else CHUNKS
        found[name], found[f"{name}_scale_inv"], said = chunked(tensor, keys)
        split = said.split([QUERIES * SIZE, keys * SIZE, keys * VALUES])
        for part, rows in zip("qkv", split, strict=True):
            state[name.replace("qkv_proj", f"{part}_proj")].copy_(rows)
    save_file(found, file)
    config = json.loads((folder / "config.json").read_text())
    plain = [name.removesuffix(".weight") for name in found
             if name.endswith("_proj.weight") and not name.endswith(PROJECTION)]  # fmt: skip
    config["quantization_config"]["ignored_layers"] = plain
    (folder / "config.json").write_text(json.dumps(config))
    return reference


def test_chunks_of_float8_are_taken_without_rounding_again(tmp_path: Path) -> None:
    reference = write_rounded(tmp_path)
    got = PagedModel(tmp_path, "float32").run({0: PROMPTS[1]})[0].log_softmax(-1).cpu()
    torch.testing.assert_close(got, score(reference, PROMPTS[1]), atol=1e-3, rtol=0)
    check_ranks(tmp_path, NAME, 2, Kit.plugins(), 2e-4)


@pytest.mark.parametrize(
    ("chunks", "sizes", "stored"),
    [(4, (12288, 1536, 1024), 116), (4, (12288, 768, 512), 108), (8, (24576, 1536, 1024), 216)],
    ids=["V2.5, windows", "V2.5", "V2.5 Pro"],
)
def test_published_sizes_come_apart(chunks: int, sizes: tuple[int, int, int], stored: int) -> None:
    """By the shapes of their headers. Each row's factor is numbered, in a chunk, by its block."""
    weight_map = FusedWeightMap(chunks=chunks, fused=(sizes,))
    factors = torch.arange(stored).float()[:, None].expand(-1, 2)
    name = "model.layers.0.self_attn.qkv_proj.weight_scale_inv"
    parts = {shard: part for _, shard, part in weight_map.pieces(name, factors)}
    assert [len(part) for part in parts.values()] == list(sizes)
    queries, keys, values = (size // chunks for size in sizes)
    for chunk in range(chunks):
        first = chunk * stored // chunks
        assert parts["q"][chunk * queries, 0] == first
        assert parts["k"][chunk * keys, 0] == first + queries // BLOCK
        last = (queries + keys + values - 1) // BLOCK
        assert parts["v"][(chunk + 1) * values - 1, 0] == first + last


def test_other_layouts_are_refused(tmp_path: Path) -> None:
    weight_map = FusedWeightMap(chunks=2, fused=((192, 96, 64),))
    name = "model.layers.0.self_attn.qkv_proj.weight_scale_inv"
    with pytest.raises(LoadError, match="2 chunks"):
        list(weight_map.pieces(name, torch.ones(3, 1)))
    case = CASES[NAME]
    case = case._replace(config=case.config | {"swa_num_key_value_heads": 3})
    (tmp_path / "config.json").write_text(json.dumps(case.config | {"architectures": [NAME]}))
    with pytest.raises(ConfigError) as caught:
        PagedModel(tmp_path, "float32", load_format="dummy")
    assert caught.value.param == "swa_num_key_value_heads"
