"""A configuration ties the head to the embeddings, and the checkpoint has a head all the same."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from jackfield import EngineConfig
from jackfield.core.errors import LoadError
from jackfield.core.loading.build import build_model
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.nn.operations import Operations
from jackfield.core.parallel.ranks import OneRank, Pipeline, Ranks
from jackfield.core.registry import load_plugins
from jackfield.entrypoints.cli.main import main
from jackfield.plugins.conformance.paged_model import PagedModel

from helpers import edit_json

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0,
    "max_position_embeddings": 128, "tie_word_embeddings": True, "initializer_range": 0.3,
}  # fmt: skip
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PROMPT = [3 + 7 * i % 89 for i in range(12)]
WEIGHTS = "model.safetensors"


def save(folder: Path, family: str = "Qwen3", **changes: Any) -> Any:
    """Save a random model, of which a file has no head."""
    kind = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(2)
    model = kind(kind.config_class(**SIZES | changes)).float().eval()
    model.save_pretrained(folder)
    return model


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return tensors


def add_head(folder: Path, embeddings: str = EMBEDDINGS) -> torch.Tensor:
    """Give a checkpoint a head of its own, which differs in the last row alone."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = tensors[embeddings].clone()
        tensors[HEAD][-1] += 1.0

    return edit(folder, change)[HEAD]


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    save(tmp_path / "odd")
    add_head(tmp_path / "odd")
    return tmp_path / "odd"


def build(folder: Path, ranks: Ranks | None = None, **options: Any) -> Any:
    options = {"model": str(folder), "device": "cpu", "dtype": "float32", **options}
    ranks = ranks or Ranks()
    config = EngineConfig(tensor_parallel_size=ranks.tensor.size, **options)
    resolved = resolve_model_config(config)
    return build_model(load_plugins(), config, resolved, CPU, Operations(), ranks)


def assert_like_transformers(folder: Path, **options: Any) -> None:
    kind = getattr(transformers, load_architecture(folder))
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model.eval()(torch.tensor([PROMPT])).logits[0]
    actual = PagedModel(folder, "float32", **options).run({0: PROMPT})[0]
    torch.testing.assert_close(actual.cpu(), expected, atol=2e-4, rtol=1e-4)


def load_architecture(folder: Path) -> str:
    return str(transformers.AutoConfig.from_pretrained(folder).architectures[0])


@pytest.mark.parametrize(
    "family", ["Llama", "Qwen3", "Gemma2", "Cohere", "GPTNeo", "OPT", "Mamba2", "Bloom", "Phi"]
)
def test_a_head_that_differs_is_loaded(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes: dict[str, Any] = {}
    if family == "GPTNeo":
        changes = {"attention_types": [[["global", "local"], 1]]}
    if family == "Bloom":
        changes = {"n_head": 2, "n_layer": 2}
    if family == "Phi":
        changes = {"num_key_value_heads": 2}
    if family == "OPT":
        changes = {"ffn_dim": 48, "word_embed_proj_dim": 32}
    if family == "Mamba2":
        changes = {"num_heads": 4, "n_groups": 2, "state_size": 8, "head_dim": 16, "chunk_size": 8}
    model = save(tmp_path, family, **changes)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    add_head(tmp_path, names[id(model.get_input_embeddings().weight)])
    with caplog.at_level(logging.WARNING, "jackfield.loading"):
        assert_like_transformers(tmp_path)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "jackfield.loading"]
    assert HEAD in line and "head of its own" in line and "tie_word_embeddings" in line


def test_an_equal_head_costs_no_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDINGS].clone()}))
    with caplog.at_level(logging.WARNING, "jackfield.loading"):
        model = build(tmp_path)
    assert HEAD not in dict(model.named_parameters()) and not caplog.records


@pytest.mark.parametrize("options", [{}, {"quantization": "rtn"}])
def test_a_head_alone_fills_the_embeddings(tmp_path: Path, options: dict[str, Any]) -> None:
    save(tmp_path)
    if options:
        rounded = {"quant_method": "rtn", "group_size": 16, "embeddings": True}
        edit_json(tmp_path / "config.json", quantization_config=rounded)
    expected = PagedModel(tmp_path, "float32").run({0: PROMPT})[0]
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDINGS)}))
    actual = PagedModel(tmp_path, "float32").run({0: PROMPT})[0]
    torch.testing.assert_close(actual.cpu(), expected, atol=0, rtol=0)


def test_a_missing_pair_is_missing(tmp_path: Path) -> None:
    save(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop(EMBEDDINGS))
    with pytest.raises(LoadError, match=r"missing tensors: model\.embed_tokens\.weight"):
        build(tmp_path)


@pytest.mark.parametrize("first", [HEAD, EMBEDDINGS])
def test_the_order_of_files_is_of_no_matter(odd: Path, first: str) -> None:
    tensors = load_file(odd / WEIGHTS)
    (odd / WEIGHTS).unlink()
    save_file({first: tensors.pop(first)}, odd / "a.safetensors")
    save_file(tensors, odd / "b.safetensors")
    every = tensors | load_file(odd / "a.safetensors")
    assert torch.equal(build(odd).lm_head.weight, every[HEAD])


def test_files_of_torch_have_their_head(odd: Path) -> None:
    tensors = load_file(odd / WEIGHTS)
    (odd / WEIGHTS).unlink()
    torch.save(tensors, odd / "pytorch_model.bin")
    assert torch.equal(build(odd, load_format="pt").lm_head.weight, tensors[HEAD])


def test_gguf_files_have_their_head(odd: Path) -> None:
    gguf = pytest.importorskip("gguf")
    tensors = load_file(odd / WEIGHTS)
    (odd / WEIGHTS).unlink()
    writer = gguf.GGUFWriter(odd / "model.gguf", "qwen3")
    writer.add_block_count(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{leaf}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert torch.equal(build(odd, load_format="gguf").lm_head.weight, tensors[HEAD])


def ranks_of(rank: int, stages: int = 1) -> Ranks:
    pipeline = Pipeline(stages - 1 - rank // 2, stages, 2, None, None)
    return Ranks(tensor=OneRank(rank % 2, 2), pipeline=pipeline)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_have_the_head_of_which_one_rank_has_a_row(odd: Path, rank: int) -> None:
    save(odd.parent / "two", num_key_value_heads=2)
    head = add_head(odd.parent / "two")
    model = build(odd.parent / "two", ranks_of(rank))
    assert torch.equal(model.lm_head.weight, head.chunk(2)[rank])


@pytest.mark.parametrize("options", [(), ("-q", "rtn")])
def test_converted_ranks_have_their_head(tmp_path: Path, options: tuple[str, ...]) -> None:
    folder, output = tmp_path / "in", tmp_path / "out"
    save(folder, num_key_value_heads=2)
    if options:
        rounded = {"quant_method": "rtn", "group_size": 16, "embeddings": True}
        edit_json(folder / "config.json", quantization_config=rounded)
    head = add_head(folder)
    flags = ["--model", str(folder), "-o", str(output), "-tp", "2", "--dtype", "float32"]
    assert main(["convert", *flags, *options]) == 0
    for rank in (0, 1):
        model = build(output, ranks_of(rank), load_format="sharded_state")
        assert torch.equal(model.lm_head.weight, head.chunk(2)[rank])


def test_the_last_stage_has_the_head(tmp_path: Path) -> None:
    save(tmp_path, num_key_value_heads=2)
    head = add_head(tmp_path)
    for rank in range(4):
        model = build(tmp_path, ranks_of(rank, 2), pipeline_parallel_size=2)
        weights = dict(model.named_parameters())
        assert (HEAD in weights) == (rank < 2)
        if rank < 2:
            assert torch.equal(weights[HEAD], head.chunk(2)[rank])


@pytest.mark.parametrize("differs", [True, False])
def test_quantized_embeddings_are_compared_as_the_checkpoint_has_them(
    tmp_path: Path, differs: bool
) -> None:
    save(tmp_path)
    rounded = {"quant_method": "rtn", "group_size": 16, "embeddings": True}
    edit_json(tmp_path / "config.json", quantization_config=rounded)
    add_head(tmp_path)
    if not differs:
        edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDINGS].clone()}))
    assert hasattr(build(tmp_path), "lm_head") == differs


def test_a_quantized_head_is_the_checkpoints_own(tmp_path: Path) -> None:
    """A tied head in a format of its own, with tensors of other names."""
    save(tmp_path)
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "lm_head": True}
    edit_json(tmp_path / "config.json", quantization_config=fp8)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if "proj" in name:
                tensors[f"{name}_scale"] = torch.tensor(1.0)
                tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[HEAD] = tensors[EMBEDDINGS].to(torch.float8_e4m3fn)
        tensors[f"{HEAD}_scale"] = torch.tensor(2.0)

    tensors = edit(tmp_path, change)
    model = build(tmp_path)
    head = model.lm_head.dense_weight()
    torch.testing.assert_close(head, 2.0 * tensors[HEAD].float())


def test_composite_checkpoints_have_their_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind = transformers.Gemma3ForConditionalGeneration
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    torch.manual_seed(2)
    model = kind(kind.config_class(text_config=SIZES, vision_config=vision)).float().eval()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    (embeddings,) = [name for name in tensors if name.endswith("embed_tokens.weight")]
    head = tensors[embeddings].clone()
    head[-1] += 1.0
    prefix = embeddings.removesuffix("model.embed_tokens.weight")
    save_file(tensors | {f"{prefix}lm_head.weight": head}, tmp_path / WEIGHTS, {"format": "pt"})
    with caplog.at_level(logging.WARNING, "jackfield.loading"):
        assert_like_transformers(tmp_path)
    assert "head of its own" in caplog.text


def test_copies_of_the_configuration_stay_tied(odd: Path, tmp_path: Path) -> None:
    """Only the model that is built is untied, not the configuration that others read."""
    shutil.copytree(odd, tmp_path / "copy")
    config = EngineConfig(model=str(tmp_path / "copy"), device="cpu", dtype="float32")
    resolved = resolve_model_config(config)
    build_model(load_plugins(), config, resolved, CPU, Operations())
    assert resolved.hf_config.tie_word_embeddings is True
