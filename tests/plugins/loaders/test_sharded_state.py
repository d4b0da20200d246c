"""A checkpoint written rank by rank gives each rank what the checkpoint itself gives it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_executor import Plugin
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, LoadError
from jackfield.core.loading.build import build_model
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.nn.attention import Attention
from jackfield.core.nn.operations import Operations
from jackfield.core.parallel.ranks import OneRank, Pipeline, Ranks
from jackfield.core.registry import load_plugins
from jackfield.entrypoints.cli.main import main

from helpers import VOCAB, edit_json, make_checkpoint

CPU = torch.device("cpu")


def build(
    folder: Path, rank: int = 0, size: int = 1, stages: int = 1, **options: Any
) -> torch.nn.Module:
    """Return the model of one rank, which is only loaded, not computed with."""
    partition = (2, 1) if "pipeline_layer_partition" in options else None
    pipeline = Pipeline(stages - 1 - rank // size, stages, size, None, partition)
    ranks = Ranks(tensor=OneRank(rank % size, size), pipeline=pipeline)
    return of_ranks(folder, ranks, **options)


def of_ranks(folder: Path, ranks: Ranks, **options: Any) -> Any:
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", tensor_parallel_size=ranks.tensor.size,
        pipeline_parallel_size=ranks.pipeline.size, **options,
    )  # fmt: skip
    model_config = resolve_model_config(config)
    return build_model(load_plugins(), config, model_config, CPU, Operations(), ranks)


def convert(folder: Path, output: Path, size: int = 1, *more: str) -> Path:
    flags = ["--model", str(folder), "-o", str(output), "-tp", str(size), "--dtype", "float32"]
    assert main(["convert", *flags, *more]) == 0
    return output


def same(left: torch.nn.Module, other: torch.nn.Module) -> None:
    """Compare every parameter, buffer and scale of two models, bit by bit."""
    for kind in ("named_parameters", "named_buffers"):
        first, second = dict(getattr(left, kind)()), dict(getattr(other, kind)())
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            assert tensor.dtype == second[name].dtype and tensor.shape == second[name].shape
            assert torch.equal(tensor, second[name]), name
    scales = [
        [part.cache_scales for part in model.modules() if isinstance(part, Attention)]
        for model in (left, other)
    ]
    assert scales[0] == scales[1]


def check(folder: Path, tmp_path: Path, size: int, **options: Any) -> Path:
    """Convert, and compare what each rank loads."""
    name = options.get("quantization")
    output = convert(folder, tmp_path / "out", size, *(["-q", name] if name else []))
    for rank in range(size):
        expected = build(folder, rank, size, **options)
        same(build(output, rank, size, load_format="sharded_state", **options), expected)
    return output


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("family", "size"),
    [("llama", 2), ("qwen2", 2), ("mixtral", 2), ("gpt-oss", 2), ("gemma3", 1), ("phi3", 1)],
)
def test_each_rank_loads_what_the_checkpoint_gives_it(
    family: str, size: int, tmp_path: Path
) -> None:
    check(make_checkpoint(family, tmp_path / "in"), tmp_path, size)


def test_stages_have_files_of_their_own(llama: Path, tmp_path: Path) -> None:
    partition = {"pipeline_layer_partition": (2, 1)}
    flags = ["-pp", "2", "--pipeline-layer-partition", "2,1"]
    output = convert(llama, tmp_path / "out", 2, *flags)
    assert len(list(output.glob("*.safetensors"))) == 4
    for rank in range(4):
        found = build(output, rank, 2, 2, load_format="sharded_state", **partition)
        same(found, build(llama, rank, 2, 2, **partition))
    with pytest.raises(ConfigError, match="was written for 2, and this engine has 1") as caught:
        build(output, 0, 2, 1, load_format="sharded_state")
    assert caught.value.param == "pipeline_parallel_size"
    with pytest.raises(ConfigError, match="was made with another one") as caught:
        build(output, 0, 2, 2, load_format="sharded_state")
    assert caught.value.param == "pipeline_layer_partition"


@pytest.mark.parametrize("method", ["int8", "rtn", "fp8"])
def test_layers_are_rounded_where_they_are_loaded(method: str, llama: Path, tmp_path: Path) -> None:
    output = check(llama, tmp_path, 2, quantization=method)
    state = load_file(output / "model-rank-1-part-0.safetensors")
    name = "model.layers.0.self_attn.qkv_proj.k.weight"
    assert state[name].dtype == torch.float32, "no number was rounded on the way"


def gptq(folder: Path) -> None:
    """Turn the products of a checkpoint to random ones of 4 bits, and give the cache scales."""
    file, group = folder / "model.safetensors", 16
    tensors = {}
    for name, tensor in load_file(file).items():
        if ".layers." not in name or not name.endswith("proj.weight"):
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        stem = name.removesuffix(".weight")
        bits = torch.iinfo(torch.int32)
        for leaf, shape in (
            ("qweight", (columns // 8, rows)), ("qzeros", (columns // group, rows // 8)),
        ):  # fmt: skip
            tensors[f"{stem}.{leaf}"] = torch.randint(bits.min, bits.max, shape, dtype=torch.int32)
        tensors[f"{stem}.scales"] = torch.rand(columns // group, rows).half()
    for layer in (0, 1):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(0.5 + layer)
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(0.25)
    save_file(tensors, file, {"format": "pt"})
    quantization = {
        "quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": False,
    }  # fmt: skip
    edit_json(folder / "config.json", quantization_config=quantization)


def test_a_quantized_checkpoint_is_divided_as_it_is(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "in")
    gptq(folder)
    output = check(folder, tmp_path, 2)
    state = load_file(output / "model-rank-0-part-0.safetensors")
    assert state["model.layers.1.self_attn.qkv_proj.q.qweight"].dtype == torch.int32
    assert float(state["model.layers.1.self_attn.k_scale"]) == 1.5


def test_whole_experts_are_written_and_read(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt-oss", tmp_path / "in")
    output = convert(folder, tmp_path / "out", 2, "--enable-expert-parallel")
    for group in (OneRank(0, 2), OneRank(1, 2)):
        ranks = Ranks(tensor=group, experts=group)
        expected = of_ranks(folder, ranks)
        assert expected.model.layers[0].mlp.experts.share.num_experts == 6
        same(of_ranks(output, ranks, load_format="sharded_state"), expected)
    with pytest.raises(
        ConfigError, match="experts are whole, and in this engine divided"
    ) as caught:
        build(output, 0, 2, load_format="sharded_state")
    assert caught.value.param == "enable_expert_parallel"
    among_engines = Ranks(tensor=OneRank(0, 2), experts=OneRank(0, 4))
    with pytest.raises(ConfigError, match="those of several divide them") as caught:
        of_ranks(output, among_engines, load_format="sharded_state")
    assert caught.value.param == "data_parallel_size"


async def generate(folder: Path, size: int, load_format: str) -> list[list[int]]:
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", load_format=load_format,
        skip_tokenizer_init=True, max_model_len=64, num_gpu_blocks_override=40,
        tensor_parallel_size=size, executor="rank_threads" if size > 1 else "inprocess",
    )  # fmt: skip
    draw = random.Random(5)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(9)] for _ in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    async with AsyncEngine(config, plugins=load_plugins(extra=[Plugin()])) as engine:

        async def one(prompt: list[int]) -> list[int]:
            async for output in engine.generate(prompt, params):
                last = output
            return list(last.outputs[0].token_ids)

        return list(await asyncio.gather(*map(one, prompts)))


async def test_an_engine_of_two_ranks_says_what_one_says(llama: Path, tmp_path: Path) -> None:
    output = convert(llama, tmp_path / "out", 2)
    assert await generate(output, 2, "sharded_state") == await generate(llama, 1, "auto")


def test_large_states_are_several_files(llama: Path, tmp_path: Path) -> None:
    output = convert(llama, tmp_path / "out", 2, "--max-file-size", "100000")
    files = sorted(file.name for file in output.glob("*.safetensors"))
    assert "model-rank-1-part-2.safetensors" in files
    same(build(output, 1, 2, load_format="sharded_state"), build(llama, 1, 2))
    (output / "model-rank-1-part-0.safetensors").unlink()
    with pytest.raises(LoadError, match=r"model-rank-1-part-0\.safetensors is missing"):
        build(output, 1, 2, load_format="sharded_state")
    last = max(int(name.split("-")[4].split(".")[0]) for name in files if "rank-0" in name)
    (output / f"model-rank-0-part-{last}.safetensors").unlink()
    with pytest.raises(LoadError, match=f"rank 0 has {last} files"):
        build(output, 0, 2, load_format="sharded_state")


def test_files_have_the_names_of_a_pattern(llama: Path, tmp_path: Path) -> None:
    options = {"pattern": "shard.{rank:03d}.{part}.safetensors"}
    output = convert(llama, tmp_path / "out", 2, "--to-extra-config", json.dumps(options))
    assert (output / "shard.001.0.safetensors").is_file()
    given: Any = {"load_format": "sharded_state", "model_loader_extra_config": options}
    same(build(output, 1, 2, **given), build(llama, 1, 2))
    with pytest.raises(LoadError, match=r"no file of rank 1 \(model-rank-\{rank\}"):
        build(output, 1, 2, load_format="sharded_state")


def test_weights_are_in_the_checkpoints_type(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "in", dtype=torch.bfloat16)
    assert main(["convert", "--model", str(folder), "-o", str(tmp_path / "out")]) == 0
    state = load_file(tmp_path / "out" / "model-rank-0-part-0.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}


def test_only_weights_are_left_behind(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "in")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    (folder / "notes").mkdir()
    output = convert(folder, tmp_path / "out")
    assert sorted(file.name for file in output.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json",
        "model-rank-0-part-0.safetensors",
    ]  # fmt: skip


# -------------------------------------------------------------------- what is refused


@pytest.fixture(scope="module")
def divided(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(llama, tmp_path_factory.mktemp("divided") / "out", 2)


@pytest.mark.parametrize(
    ("options", "field", "text"),
    [
        ({"size": 1}, "tensor_parallel_size", "was written for 2, and this engine has 1"),
        ({"size": 2, "quantization": "int8"}, "quantization", "made for no method.* has int8"),
    ],
)
def test_another_engines_files_are_refused(
    options: Any, field: str, text: str, divided: Path
) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        build(divided, load_format="sharded_state", **options)
    assert caught.value.param == field


def test_another_architecture_is_refused(divided: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(divided, tmp_path / "other")
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match="weights of LlamaForCausalLM") as caught:
        build(folder, 0, 2, load_format="sharded_state")
    assert caught.value.param == "model"


def test_a_missing_or_exchanged_rank_is_named(divided: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(divided, tmp_path / "other")
    first, second = (folder / f"model-rank-{rank}-part-0.safetensors" for rank in (0, 1))
    shutil.copyfile(second, first)
    with pytest.raises(LoadError, match="has the weights of rank 1, not of rank 0"):
        build(folder, 0, 2, load_format="sharded_state")
    second.unlink()
    with pytest.raises(LoadError, match=r"no file of rank 1 .* only of ranks 0"):
        build(folder, 1, 2, load_format="sharded_state")
    first.unlink()
    with pytest.raises(LoadError, match=r"no file of rank 1 .* and of no other"):
        build(folder, 1, 2, load_format="sharded_state")


def rewrite(file: Path, tensors: Any, **metadata: str) -> None:
    with safe_open(file, framework="pt") as opened:
        kept = dict(opened.metadata())
    save_file(tensors, file, {**kept, **metadata})


KEY_SCALE = "model.layers.0.self_attn.k_scale"


def test_tensors_that_do_not_fit_are_named(divided: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(divided, tmp_path / "other")
    file = folder / "model-rank-0-part-0.safetensors"
    tensors, name = load_file(file), "model.layers.0.mlp.down_proj.weight"
    whole = tensors.pop(name)
    for changed, text in (
        (tensors, f"missing tensors: {name}"),
        ({**tensors, name: whole[:-1].contiguous()}, f"'{name}' has shape"),
        ({**tensors, name: whole, "model.side": torch.ones(2)}, "unexpected tensor 'model.side'"),
        ({**tensors, name: whole.int()}, f"'{name}' holds torch.int32"),
        *(
            (
                {**tensors, name: whole, KEY_SCALE: torch.tensor(scale)},
                "must be one positive number",
            )
            for scale in (0.0, float("inf"), [1.0, 1.0])
        ),
    ):
        rewrite(file, changed)
        with pytest.raises(LoadError, match=text):
            build(folder, 0, 2, load_format="sharded_state")


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (None, "has no record of how it was divided"),
        ("{", "its record cannot be read"),
        ('{"architecture": "A", "quantization": null, "tensor_parallel_size": 0, "rank": 0}',
         "its record cannot be read"),
    ],
)  # fmt: skip
def test_files_of_unknown_origin_are_refused(
    record: str | None, text: str, divided: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(divided, tmp_path / "other")
    file = folder / "model-rank-0-part-0.safetensors"
    tensors = load_file(file)
    save_file(tensors, file, {"format": "pt"} if record is None else {"jackfield": record})
    with pytest.raises(LoadError, match=text):
        build(folder, 0, 2, load_format="sharded_state")


@pytest.mark.parametrize(
    "pattern",
    ["../{rank}-{part}", "all-{part}", "{rank}-{part}-{other}", "{rank", "{rank.real}", 5],
)
def test_patterns_that_name_no_files_are_refused(pattern: Any, divided: Path) -> None:
    options: Any = {"model_loader_extra_config": {"pattern": pattern}}
    with pytest.raises(ConfigError, match="pattern") as caught:
        build(divided, 0, 2, load_format="sharded_state", **options)
    assert caught.value.param == "model_loader_extra_config"


def test_options_that_a_loader_does_not_take_are_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="safetensors has no pattern") as caught:
        build(llama, model_loader_extra_config={"pattern": "x"})
    assert caught.value.param == "model_loader_extra_config"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--to", "gguf"], "--to: the loader gguf only reads its format"),
        (["--to", "nothing"], "--to: "),
        (["--max-file-size", "0"], "--max-file-size: must be at least 1"),
        (["--to-extra-config", '{"a": 1}'], "--to-extra-config: .* has no a"),
        (["-tp", "3"], "--tensor-parallel-size: .* divided by 3"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    flags: list[str], text: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert main(["convert", "--model", str(llama), "-o", str(output), *flags]) == 2
    assert re.search(text, capsys.readouterr().err)
    assert not list(tmp_path.iterdir()), "nothing is left"


def test_an_output_that_exists_is_left_alone(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "--model", str(llama), "-o", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
