"""Checkpoints whole, in pieces, damaged and hostile: what loads, and what the error says."""

from __future__ import annotations

import json
import runpy
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jackfield import AsyncEngine, EngineConfig, SamplingParams, hookimpl
from jackfield.core.errors import ConfigError, LoadError, OutOfMemory
from jackfield.core.loading.build import build_model
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.core.loading.model_config import resolve_model_config, rope_parameters
from jackfield.core.nn.operations import Operations
from jackfield.core.nn.rotary import inverse_frequencies
from jackfield.core.registry import Plugins, load_plugins

from helpers import COMMON, edit_json, make_checkpoint

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each kind of checkpoint, saved once; tests copy it."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folders[name] = make_checkpoint(name, tmp_path_factory.mktemp("saved"))
        return folders[name]

    return get


@pytest.fixture
def checkpoint(saved: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a checkpoint that the test may damage."""

    def copy(name: str = "llama") -> Path:
        return Path(shutil.copytree(saved(name), tmp_path / "checkpoint"))

    return copy


def load(folder: Path, *, plugins: Plugins | None = None, **options: Any) -> nn.Module:
    config = EngineConfig(**{"model": str(folder), "device": "cpu", "dtype": "float32", **options})
    model_config = resolve_model_config(config)
    return build_model(
        plugins or load_plugins(), config, model_config, torch.device("cpu"), Operations()
    )


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def shard(folder: Path, **index: str) -> dict[str, str]:
    """Split the weights over two files with an index; `index`: replacements of file names."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    files = {"first": names[::2], "second": names[1::2]}
    weight_map = {}
    for file, part in files.items():
        save_file({n: tensors[n] for n in part}, folder / f"{file}.safetensors")
        weight_map |= dict.fromkeys(part, index.get(file, f"{file}.safetensors"))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def assert_holds(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Each parameter equals the checkpoint's tensors, the merged ones stacked in order."""
    actual = dict(model.named_parameters())
    merged = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for name, parameter in actual.items():
        for merged_name, parts in merged.items():
            if merged_name in name:
                sources = [tensors[name.replace(merged_name, part)] for part in parts]
                torch.testing.assert_close(parameter, torch.cat(sources), rtol=0, atol=0)
                break
        else:
            torch.testing.assert_close(parameter, tensors[name], rtol=0, atol=0)


# ---------------------------------------------------------------- whole checkpoints


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_every_tensor_lands_in_its_place(checkpoint: Callable[..., Path], name: str) -> None:
    folder = checkpoint(name)
    assert_holds(load(folder), load_file(folder / WEIGHTS))


def test_sharded_checkpoint_equals_the_one_in_one_file(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    tensors = load_file(folder / WEIGHTS)
    shard(folder)
    assert_holds(load(folder), tensors)


def test_files_that_the_index_does_not_name_are_not_read(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    shard(folder)
    (folder / "consolidated.safetensors").write_bytes(b"not even safetensors")
    load(folder)


def test_model_safetensors_is_read_alone_where_it_exists(checkpoint: Callable[..., Path]) -> None:
    """Mistral's repositories hold the same weights twice, under other names."""
    folder = checkpoint()
    save_file({"layers.0.wq": torch.zeros(2)}, folder / "consolidated.safetensors")
    load(folder)


def test_tied_embeddings_have_one_matrix(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("qwen2")
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)
    model = load(folder)
    assert "lm_head.weight" not in dict(model.named_parameters())
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    hidden = torch.randn(3, embedding.shape[1])
    torch.testing.assert_close(model.compute_logits(hidden), model.model.norm(hidden) @ embedding.T)


def test_tied_head_that_was_saved_all_the_same_is_ignored(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("qwen2")
    tensors = load_file(folder / WEIGHTS)
    head = tensors["model.embed_tokens.weight"].clone()
    edit_weights(folder, lambda t: t.update({"lm_head.weight": head}))
    assert_holds(load(folder), tensors)


def test_weights_of_another_float_type_are_converted(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    edit_weights(folder, lambda t: t.update({n: v.to(torch.bfloat16) for n, v in t.items()}))
    expected = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
    assert_holds(load(folder), expected)


def test_old_buffers_in_a_checkpoint_are_ignored(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(folder, lambda t: t.update({name: torch.ones(8)}))
    load(folder)


# ---------------------------------------------------------------- wrong checkpoints


def refused(folder: Path, *words: str, error: type[Exception] = LoadError, **options: Any) -> str:
    """The message of the refusal, which holds every one of `words`."""
    with pytest.raises(error) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    return message


@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "lm_head.weight",
     "model.layers.2.mlp.up_proj.weight"],
)  # fmt: skip
def test_missing_tensor_is_named_as_the_checkpoint_would(
    checkpoint: Callable[..., Path], name: str
) -> None:
    folder = checkpoint()
    edit_weights(folder, lambda t: t.pop(name))
    assert refused(folder) == f"missing tensors: {name}"


def test_many_missing_tensors_are_counted(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    edit_weights(folder, lambda t: [t.pop(n) for n in list(t) if "layers.1." in n])
    refused(folder, "model.layers.1.input_layernorm.weight", " and 1 more")


def test_unexpected_tensor_is_named_with_its_file(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    name = "model.layers.0.self_attn.q_proj.bias"
    edit_weights(folder, lambda t: t.update({name: torch.zeros(64)}))
    refused(folder, WEIGHTS, "unexpected tensor", name)


def test_layer_that_the_model_does_not_have_is_unexpected(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    edit_json(folder / "config.json", num_hidden_layers=2)
    refused(folder, "unexpected tensor 'model.layers.2.")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.k_proj.weight"])
def test_a_wrong_shape_is_reported_with_both_shapes(
    checkpoint: Callable[..., Path], name: str
) -> None:
    folder = checkpoint()
    right = tuple(load_file(folder / WEIGHTS)[name].shape)
    wrong = (3, *right[1:])
    edit_weights(folder, lambda t: t.update({name: torch.zeros(wrong)}))
    refused(folder, WEIGHTS, name, str(wrong), str(right))


def test_integer_tensors_are_refused(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    name = "model.layers.0.mlp.down_proj.weight"
    edit_weights(folder, lambda t: t.update({name: t[name].to(torch.int8)}))
    refused(folder, name, "torch.int8", "not quantized")


def test_no_weights_at_all(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    refused(folder, "no *.safetensors", "load_format=pt", "load_format=dummy")
    (folder / "pytorch_model.bin").rename(folder / "model.gguf")
    refused(folder, "no *.safetensors", "load_format=gguf", "load_format=dummy")


def test_missing_shard_is_named(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    shard(folder)
    (folder / "second.safetensors").unlink()
    refused(folder, INDEX, "'second.safetensors'", "missing")


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "sub/second.safetensors", "..", ""]
)
def test_index_cannot_name_a_file_outside_its_folder(
    checkpoint: Callable[..., Path], name: str
) -> None:
    folder = checkpoint()
    shard(folder, second=name)
    for place in (folder.parent / "outside.safetensors", folder / "sub" / "second.safetensors"):
        place.parent.mkdir(exist_ok=True)
        shutil.copy(folder / "second.safetensors", place)
    refused(folder, INDEX, repr(name))


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}',
             '{"weight_map": {"a": null}}', '{"weight_map": {"a": ["b"]}}'],
)  # fmt: skip
def test_index_that_is_none(checkpoint: Callable[..., Path], text: str) -> None:
    folder = checkpoint()
    (folder / INDEX).write_text(text)
    refused(folder, INDEX, "cannot be read")


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def cut_in_the_header(data: bytes) -> bytes:
    return data[:40]


def empty(data: bytes) -> bytes:
    return b""


def huge_header(data: bytes) -> bytes:
    return struct.pack("<Q", 2**62) + data[8:]


def offsets_past_the_end(data: bytes) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = next(n for n in header if n != "__metadata__")
    start, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [start + 10**9, end + 10**9]
    written = json.dumps(header).encode()
    return struct.pack("<Q", len(written)) + written + data[8 + length :]


def with_header(data: bytes, header: Any) -> bytes:
    written = header if isinstance(header, bytes) else json.dumps(header).encode()
    (length,) = struct.unpack("<Q", data[:8])
    return struct.pack("<Q", len(written)) + written + data[8 + length :]


def with_entry(data: bytes, **changes: Any) -> bytes:
    """The norm's entry of the header, changed."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"].update(changes)
    return with_header(data, header)


def two_tensors_in_one_place(data: bytes) -> bytes:
    return with_entry(data, data_offsets=[0, 256])


def offsets_backwards(data: bytes) -> bytes:
    return with_entry(data, data_offsets=[512, 256])


def negative_shape(data: bytes) -> bytes:
    return with_entry(data, shape=[-64])


def overflowing_shape(data: bytes) -> bytes:
    return with_entry(data, shape=[2**62, 4])


def unknown_type(data: bytes) -> bytes:
    return with_entry(data, dtype="PICKLE")


def deep_header(data: bytes) -> bytes:
    return with_header(data, b"[" * 100_000)


def header_that_is_no_text(data: bytes) -> bytes:
    return with_header(data, b"\xff\xfe{}")


def bytes_behind_the_end(data: bytes) -> bytes:
    return data + b"more"


def a_pickle(data: bytes) -> bytes:
    return (
        b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
    )


@pytest.mark.parametrize(
    "damage",
    [truncated, cut_in_the_header, empty, huge_header, offsets_past_the_end, offsets_backwards,
     two_tensors_in_one_place, negative_shape, overflowing_shape, unknown_type, deep_header,
     header_that_is_no_text, bytes_behind_the_end, a_pickle],
)  # fmt: skip
def test_damaged_file_is_refused(
    checkpoint: Callable[..., Path], damage: Callable[[bytes], bytes]
) -> None:
    folder = checkpoint()
    file = folder / WEIGHTS
    file.write_bytes(damage(file.read_bytes()))
    refused(folder, WEIGHTS, "not a safetensors file")


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_pointer_of_git_lfs_is_called_one(checkpoint: Callable[..., Path], name: str) -> None:
    folder = checkpoint()
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    refused(folder, name, "git lfs pull")


def test_a_device_where_weights_should_be_is_refused(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("/dev/zero")
    refused(folder, WEIGHTS, "is no file")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
async def test_end_tokens_beyond_the_vocabulary_never_come(
    checkpoint: Callable[..., Path], file: str
) -> None:
    """Nor do they reach the sampler, which masks end tokens for `min_tokens`."""
    folder = checkpoint()
    edit_json(folder / file, eos_token_id=[2, 10**9, -1])
    config = EngineConfig(
        model=str(folder), device="cpu", skip_tokenizer_init=True, attention_backend="torch",
        max_model_len=64,
    )  # fmt: skip
    async with AsyncEngine(config) as engine:
        assert engine.model_config.eos_token_ids == {2}
        params = SamplingParams(max_tokens=4, min_tokens=4)
        last = [out async for out in engine.generate([3, 4], params)][-1]
        assert len(last.outputs[0].token_ids) == 4


async def test_a_cache_beyond_the_memory_is_reported_as_such(
    checkpoint: Callable[..., Path],
) -> None:
    config = EngineConfig(
        model=str(checkpoint()), device="cpu", skip_tokenizer_init=True,
        attention_backend="torch", num_gpu_blocks_override=2**40,
    )  # fmt: skip
    engine = AsyncEngine(config)
    with pytest.raises(OutOfMemory, match="out of device memory while starting"):
        await engine.start()
    await engine.stop()


async def test_engine_that_cannot_load_says_why_and_leaves_nothing_behind(
    checkpoint: Callable[..., Path],
) -> None:
    folder = checkpoint()
    edit_weights(folder, lambda t: t.pop("model.norm.weight"))
    engine = AsyncEngine(
        EngineConfig(model=str(folder), device="cpu", skip_tokenizer_init=True, dtype="float32")
    )
    with pytest.raises(LoadError, match=r"missing tensors: model\.norm\.weight"):
        await engine.start()
    await engine.stop()


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "3", "\ufeff{}"])
def test_config_that_is_no_json_object(checkpoint: Callable[..., Path], text: str) -> None:
    folder = checkpoint()
    (folder / "config.json").write_text(text)
    refused(folder, "config.json")


def test_generation_config_that_is_no_json_object(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    (folder / "generation_config.json").write_text("nope")
    refused(folder, "generation_config.json", "cannot be read")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 63}, "63"),
        ({"hidden_size": 0}, "hidden_size 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"vocab_size": 2**60}, "vocab_size"),
        ({"head_dim": -4}, "head_dim -4"),
        ({"intermediate_size": 2**62}, "intermediate_size"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": ["ZebraForCausalLM"]}, "'ZebraForCausalLM'"),
        ({"quantization_config": {"quant_method": "zebra"}}, "'zebra'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method"),
        ({"quantization_config": "awq"}, "quantization_config"),
    ],
)
def test_config_that_cannot_be_served_is_refused(
    checkpoint: Callable[..., Path], changes: dict[str, Any], word: str
) -> None:
    folder = checkpoint()
    edit_json(folder / "config.json", **changes)
    refused(folder, word, error=ConfigError)


def test_unknown_model_type_is_refused_with_the_known_architectures(
    checkpoint: Callable[..., Path],
) -> None:
    folder = checkpoint()
    edit_json(folder / "config.json", model_type="zebra", architectures=["ZebraForCausalLM"])
    refused(
        folder, "'zebra'", "'ZebraForCausalLM'", "LlamaForCausalLM", "MistralForCausalLM",
        "Qwen2ForCausalLM", "Qwen3ForCausalLM", "plugin", error=ConfigError,
    )  # fmt: skip


class Zebra:
    jackfield_api = 3

    @hookimpl
    def register_models(self, registry: Any) -> None:
        registry.add("ZebraForCausalLM", "jackfield.plugins.models.llama:LlamaForCausalLM")


def test_plugin_may_serve_a_model_type_that_transformers_does_not_know(
    checkpoint: Callable[..., Path],
) -> None:
    folder = checkpoint()
    edit_json(folder / "config.json", model_type="zebra", architectures=["ZebraForCausalLM"])
    assert_holds(load(folder, plugins=load_plugins(extra=[Zebra()])), load_file(folder / WEIGHTS))


def test_unknown_model_type_without_a_vocabulary(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    (folder / "config.json").write_text('{"model_type": "zebra", "architectures": ["Z"]}')
    refused(folder, "vocab_size", error=ConfigError)


def test_overrides_replace_what_the_checkpoint_says(checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig(model=str(checkpoint()), hf_overrides={"max_position_embeddings": 77})
    assert resolve_model_config(config).max_model_len == 77


def test_overrides_reach_the_rope_however_the_checkpoint_spells_it(
    checkpoint: Callable[..., Path],
) -> None:
    folder = checkpoint()
    file = folder / "config.json"
    facts = json.loads(file.read_text())
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        facts.pop(name, None)

    def theta(**spelled: object) -> float:
        file.write_text(json.dumps(facts | spelled))
        config = EngineConfig(model=str(folder), hf_overrides={"rope_theta": 77.0})
        return float(resolve_model_config(config).rope_parameters["rope_theta"])

    flat = {"rope_type": "default", "rope_theta": 5.0}
    assert theta(rope_theta=5.0) == theta(rope_parameters=flat) == 77.0
    with pytest.raises(ConfigError, match="for each kind of layer"):
        theta(rope_parameters={"full_attention": flat})


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/folder", "one", "a/b/c"])
def test_model_that_is_nowhere(model: str) -> None:
    with pytest.raises(LoadError, match="neither a folder here nor a hub name"):
        resolve_model_config(EngineConfig(model=model))


def test_unknown_load_format_names_those_there_are(checkpoint: Callable[..., Path]) -> None:
    refused(
        checkpoint(), "load_format", "safetenser", "did you mean 'safetensors'", "dummy",
        error=ConfigError, load_format="safetenser",
    )  # fmt: skip


# ---------------------------------------------------------------- hostile checkpoints

EVIL = """\
from pathlib import Path
Path(__file__).with_name("ran").touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM
class Config(PretrainedConfig):
    model_type = "evil"
class Model(Qwen3ForCausalLM):
    pass
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
AUTO_MAP = {
    "AutoConfig": "evil.Config",
    "AutoModelForCausalLM": "evil.Model",
    "AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"],
    "AutoProcessor": "evil.Model",
}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """The embedded model, whose files all point to code that leaves a trace when imported."""
    folder = Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "hostile"))
    (folder / "evil.py").write_text(EVIL)
    edit_json(folder / "config.json", auto_map=AUTO_MAP)
    edit_json(folder / "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="Tokenizer")
    return folder


def test_the_trap_is_live(hostile: Path) -> None:
    """Or the next tests would prove nothing."""
    runpy.run_path(str(hostile / "evil.py"))
    assert (hostile / "ran").exists()


async def test_code_of_a_checkpoint_never_runs(hostile: Path) -> None:
    config = EngineConfig(
        model=str(hostile), device="cpu", num_gpu_blocks_override=40, max_num_seqs=2
    )
    async with AsyncEngine(config) as engine:
        stream = engine.generate("Hello", SamplingParams(max_tokens=2))
        outputs = [output async for output in stream]
    assert len(outputs[-1].outputs[0].token_ids) == 2
    assert not (hostile / "ran").exists()


@pytest.mark.parametrize("trust", [False, True])
async def test_code_of_a_checkpoint_of_unknown_type_never_runs(hostile: Path, trust: bool) -> None:
    edit_json(hostile / "config.json", model_type="evil", architectures=["EvilForCausalLM"])
    config = EngineConfig(model=str(hostile), device="cpu", trust_remote_code=trust)
    with pytest.raises(ConfigError, match="EvilForCausalLM"):
        await AsyncEngine(config).start()
    assert not (hostile / "ran").exists()


async def test_code_of_a_tokenizer_never_runs(hostile: Path) -> None:
    (hostile / "tokenizer.json").unlink()
    with pytest.raises(LoadError, match="tokenizer"):
        await AsyncEngine(EngineConfig(model=str(hostile), device="cpu")).start()
    assert not (hostile / "ran").exists()


# ---------------------------------------------------------------- rope variants

LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-tuned": {
        "factor": 16.0, "original_max_position_embeddings": 512, "beta_fast": 16.0,
        "beta_slow": 2.0, "attention_factor": 1.25,
    },
}  # fmt: skip
LENGTHS = {"linear": 2048, "dynamic": 512, "llama3": 512, "yarn": 2048, "yarn-tuned": 8192}


def write_config(folder: Path, **changes: Any) -> EngineConfig:
    """A config.json as older tools wrote it: no `rope_parameters`."""
    common = {**COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({**common, **changes}))
    return EngineConfig(model=str(folder), device="cpu")


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_type", "type"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_of_every_spelling_matches_transformers(
    tmp_path: Path, name: str, spelling: str
) -> None:
    kind = name.partition("-")[0]
    if spelling == "rope_parameters":
        rope = {"rope_type": kind, "rope_theta": 500.0, **ROPES[name]}
        config = write_config(tmp_path, rope_parameters=rope)
    else:
        scaling = {spelling: kind, **ROPES[name]}
        config = write_config(tmp_path, rope_theta=500.0, rope_scaling=scaling)
    model_config = resolve_model_config(config)
    assert model_config.max_model_len == LENGTHS[name]
    hf = LlamaConfig(
        **COMMON, rope_parameters={"rope_type": kind, "rope_theta": 500.0, **ROPES[name]}
    )
    expected, wanted_factor = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), 512)
    frequencies, factor = inverse_frequencies(
        rope_parameters(model_config.hf_config), model_config.head_dim,
        model_config.max_model_len, hf.max_position_embeddings,
    )  # fmt: skip
    torch.testing.assert_close(frequencies, expected)
    assert factor == pytest.approx(wanted_factor)


def test_dynamic_rope_stretches_to_the_requested_length(tmp_path: Path) -> None:
    scaling = {"type": "dynamic", "factor": 4.0}
    config = write_config(tmp_path, rope_theta=500.0, rope_scaling=scaling)
    engine_config = resolve_model_config(EngineConfig(model=config.model, max_model_len=2000))
    hf = LlamaConfig(
        **COMMON, rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    )
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](hf, torch.device("cpu"), 2000)
    frequencies, _ = inverse_frequencies(rope_parameters(engine_config.hf_config), 16, 2000, 512)
    torch.testing.assert_close(frequencies, expected)


@pytest.mark.parametrize(("name", "reach"), [(n, 2048 if n == "dynamic" else LENGTHS[n])
                                             for n in ROPES])  # fmt: skip
def test_length_past_the_ropes_reach_is_refused(tmp_path: Path, name: str, reach: int) -> None:
    scaling = {"rope_type": name.partition("-")[0], **ROPES[name]}
    model = write_config(tmp_path, rope_theta=500.0, rope_scaling=scaling).model
    assert resolve_model_config(EngineConfig(model=model, max_model_len=reach))
    with pytest.raises(ConfigError, match=f"max_model_len: {reach + 1} .* {reach};"):
        resolve_model_config(EngineConfig(model=model, max_model_len=reach + 1))


def test_unknown_rope_is_refused_by_name(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    edit_json(folder / "config.json", rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    refused(folder, "rope_type", "'spiral'", error=ConfigError)


def test_incomplete_rope_is_refused_by_its_missing_key(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    rope = {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}
    edit_json(
        folder / "config.json", rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, **rope}
    )
    refused(folder, "low_freq_factor", error=ConfigError)
