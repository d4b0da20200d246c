"""The kit of weight loaders: those in the box pass it, and planted bugs do not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mutants import Mutant, mutant_tests, plugin_of, subclass
from safetensors.torch import save_file

from jackfield.core.errors import ConfigError, LoadError
from jackfield.core.loading.state.record import StateRecord
from jackfield.core.loading.weight_map import ParameterFiller
from jackfield.plugins.conformance.loaders import WeightLoaderKit
from jackfield.plugins.loaders.safetensors import SafetensorsLoader
from jackfield.plugins.loaders.sharded_state import ShardedStateLoader


def write_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Serialize tensors by the package itself, and cut off the room that it leaves at the end: what
    is missing of that is no damage."""
    tensorizer = pytest.importorskip("tensorizer")
    serializer = tensorizer.TensorSerializer(str(file))
    serializer.write_state_dict(dict(tensors))
    serializer.close()
    index = tensorizer.TensorDeserializer(str(file), device="cpu", lazy_load=True)._metadata
    os.truncate(file, max(entry.data_offset + entry.data_length for entry in index.values()))


class TestSafetensors(WeightLoaderKit):
    name = "safetensors"


class TestPt(WeightLoaderKit):
    name = "pt"

    def write(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        torch.save(dict(tensors), folder / "pytorch_model.bin")

    def write_in_parts(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        names = sorted(tensors)
        for number in range(2):
            part = {name: tensors[name] for name in names[number::2]}
            torch.save(part, folder / f"consolidated.{number:02d}.pt")


class TestMistral(WeightLoaderKit):
    """The names and the order of rows of Mistral's own checkpoints."""

    name = "mistral"
    NAMES = {
        "model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.": "",
        "self_attn": "attention", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo",
        "mlp": "feed_forward", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip

    def own_name(self, name: str) -> str:
        for usual, own in self.NAMES.items():
            name = name.replace(usual, own)
        return name

    def own(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in tensors.items():
            if "q_proj" in name or "k_proj" in name:
                rows = tensor.reshape(-1, 2, 8, *tensor.shape[1:]).transpose(1, 2)
                tensor = rows.reshape(tensor.shape).contiguous()
            found[self.own_name(name)] = tensor
        return found

    def write(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        save_file(self.own(tensors), folder / "consolidated.safetensors")

    def write_in_parts(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        own, index = self.own(tensors), {}
        for number in range(3):
            file = f"consolidated-{number}.safetensors"
            part = {name: own[name] for name in sorted(own)[number::3]}
            save_file(part, folder / file)
            index |= dict.fromkeys(part, file)
        (folder / "consolidated.safetensors.index.json").write_text(
            json.dumps({"weight_map": index})
        )


class TestRunaiStreamer(WeightLoaderKit):
    name = "runai_streamer"

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("runai_model_streamer")


class TestTensorizer(WeightLoaderKit):
    name = "tensorizer"

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("tensorizer")

    def write(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        write_tensors(tensors, folder / "model.tensors")

    def write_in_parts(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        names = sorted(tensors)
        for number in range(2):
            part = {name: tensors[name] for name in names[number::2]}
            write_tensors(part, folder / f"part-{number}.tensors")


MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
}  # fmt: skip


class TestShardedState(WeightLoaderKit):
    """Its tensors are the model's own, so products of one layer are one. What quantized layers take
    has files of its own (`test_sharded_state.py`)."""

    name = "sharded_state"

    def called(self, name: str) -> str:
        for whole, parts in MERGED.items():
            for part in parts:
                name = name.replace(f".{part}.", f".{whole}.")
        return name

    def state(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Join what is one parameter; without one of its parts there is none."""
        groups: dict[str, list[str]] = {}
        for name in tensors:
            groups.setdefault(self.called(name), []).append(name)
        state = {}
        for merged, names in groups.items():
            order = next((parts for whole, parts in MERGED.items() if whole in merged), ("",))
            if len(names) == len(order):
                names.sort(key=lambda name: next(n for n, part in enumerate(order) if part in name))
                state[merged] = torch.cat([tensors[name] for name in names])
        return state

    def write(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        self.save(self.state(tensors), folder, 1 << 30)

    def write_in_parts(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        self.save(self.state(tensors), folder, 1 << 16)

    def save(self, state: dict[str, torch.Tensor], folder: Path, size: int) -> None:
        record = StateRecord(
            architecture="LlamaForCausalLM", quantization=None, tensor_parallel_size=1, rank=0
        )
        ShardedStateLoader.save(state, record, folder, {}, size)

    def test_quantized_layers_get_their_tensors(self, tensors: Any, tmp_path: Path) -> None:
        """A method that the files were not made for is refused."""
        folder = self.checkpoint(tmp_path, tensors)
        with pytest.raises(ConfigError, match="quantization"):
            self.load(folder, quantization="int8")


class TestDummy(WeightLoaderKit):
    name = "dummy"
    reads = False


class TestGguf(WeightLoaderKit):
    """In float16, as the package writes it; a Llama's files pair neighbouring channels."""

    name = "gguf"
    config = {"attention_bias": False}
    tolerance = 1e-3

    def write(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        gguf = pytest.importorskip("gguf")
        kind = gguf.GGMLQuantizationType.F16
        writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
        writer.add_block_count(2)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
        for name, tensor in tensors.items():
            stored = tensor.float().numpy()
            stem, _, leaf = name.rpartition(".")
            heads = {"q_proj": 4, "k_proj": 2}.get(stem.rpartition(".")[2])
            if heads:
                halves = stored.reshape(heads, 2, -1, stored.shape[1])
                stored = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(stored.shape)
            called = f"{names.get_name(stem) or stem}.{leaf}"
            if stored.ndim == 2:
                writer.add_tensor(called, gguf.quants.quantize(stored, kind), raw_dtype=kind)
            else:
                writer.add_tensor(called, stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


class Kit(WeightLoaderKit):
    name = "subject"
    plugin = plugin_of("weight_loader", "subject", SafetensorsLoader)


def filled(**changes: Any) -> type:
    """A loader whose filler has some methods replaced."""
    filler = subclass(ParameterFiller, **changes)

    class Planted(SafetensorsLoader):
        def load(self, model: Any, device: Any) -> None:
            import jackfield.plugins.loaders.safetensors as module

            original = module.ParameterFiller
            module.ParameterFiller = filler
            try:
                super().load(model, device)
            finally:
                module.ParameterFiller = original

    return Planted


def around(change: Any) -> type:
    """A loader that calls `change(load, self, model, device)`."""

    class Planted(SafetensorsLoader):
        def load(self, model: Any, device: Any) -> None:
            change(super().load, self, model, device)

    return Planted


def fill(self: Any, name: str, tensor: torch.Tensor) -> None:
    ParameterFiller.fill(self, name, tensor)


def skips_what_is_unknown(self: Any, name: str, tensor: torch.Tensor) -> None:
    if "side_proj" not in name:
        fill(self, name, tensor)


def fits_anything(self: Any, name: str, tensor: torch.Tensor) -> None:
    if name.endswith("down_proj.weight") and tensor.shape != (64, 128):
        tensor = torch.zeros(64, 128)
    fill(self, name, tensor)


def no_biases(self: Any, name: str, tensor: torch.Tensor) -> None:
    fill(self, name, torch.zeros_like(tensor) if name.endswith("bias") else tensor)


def through_bfloat16(self: Any, name: str, tensor: torch.Tensor) -> None:
    fill(self, name, tensor.to(torch.bfloat16).to(tensor.dtype))


def first_layer_everywhere(self: Any, name: str, tensor: torch.Tensor) -> None:
    cache = self.__dict__.setdefault("kept", {})
    first = name.replace("layers.1.", "layers.0.")
    cache.setdefault(first, tensor)
    fill(self, name, cache[first])


def says_nothing(self: Any) -> None:
    for staging in self.quantized.values():
        staging.finish()


def without_names(load: Any, self: Any, model: Any, device: Any) -> None:
    try:
        load(model, device)
    except LoadError as error:
        raise LoadError("the checkpoint does not fit the model") from error


def bare_errors(load: Any, self: Any, model: Any, device: Any) -> None:
    try:
        load(model, device)
    except LoadError as error:
        raise RuntimeError(str(error)) from error


def widens(load: Any, self: Any, model: Any, device: Any) -> None:
    load(model, device)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()


def replaces(load: Any, self: Any, model: Any, device: Any) -> None:
    load(model, device)
    norm = model.get_submodule("model.norm")
    norm.weight = torch.nn.Parameter(norm.weight.data.clone(), requires_grad=False)


def noise(load: Any, self: Any, model: Any, device: Any) -> None:
    load(model, device)
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point:
            parameter.data += torch.randn_like(parameter) * 1e-3


def leaves_a_file(load: Any, self: Any, model: Any, device: Any) -> None:
    load(model, device)
    (self.folder / "cache.bin").write_bytes(b"converted")


def first_file_only(load: Any, self: Any, model: Any, device: Any) -> None:
    import jackfield.plugins.loaders.safetensors as module

    original = module.checkpoint_files
    module.checkpoint_files = lambda folder: original(folder)[:1]
    try:
        load(model, device)
    finally:
        module.checkpoint_files = original


FILLED = "test_every_parameter_is_filled"
HALF = "test_a_checkpoint_in_half_precision_is_widened"
TIED = "test_tied_embeddings_need_no_head"
PARTS = "test_several_files_are_one_checkpoint"
QUANTIZED = "test_quantized_layers_get_their_tensors"
SAME, READ = "test_loading_twice_gives_the_same", "test_the_checkpoint_is_only_read"
MISSING = "test_a_missing_tensor_is_refused_by_name"
UNKNOWN = "test_a_tensor_without_a_place_is_refused_by_name"
SHAPE = "test_a_tensor_of_another_shape_is_refused_by_name"
DAMAGED = "test_what_is_no_checkpoint_is_refused"

MUTANTS = {
    "unknown tensors pass": Mutant(filled(fill=skips_what_is_unknown), (UNKNOWN,)),
    "any shape passes": Mutant(filled(fill=fits_anything), (SHAPE,)),
    "nothing is missed": Mutant(filled(finish=says_nothing), (MISSING,)),
    "biases are left out": Mutant(filled(fill=no_biases), (FILLED, HALF, TIED, PARTS, QUANTIZED)),
    "rounded on the way": Mutant(
        filled(fill=through_bfloat16), (FILLED, HALF, TIED, PARTS, QUANTIZED)
    ),
    "one layer for all": Mutant(
        filled(fill=first_layer_everywhere), (FILLED, HALF, TIED, PARTS, QUANTIZED)
    ),
    "an error names nothing": Mutant(around(without_names), (MISSING, UNKNOWN, SHAPE)),
    "errors of another kind": Mutant(around(bare_errors), (DAMAGED, MISSING, UNKNOWN, SHAPE)),
    "parameters become float32": Mutant(around(widens), (FILLED,)),
    "a parameter is replaced": Mutant(around(replaces), (FILLED,)),
    "not the same each time": Mutant(around(noise), (SAME, FILLED, HALF, TIED, PARTS, QUANTIZED)),
    "a file is left behind": Mutant(around(leaves_a_file), (READ,)),
    "only the first file": Mutant(around(first_file_only), (PARTS,)),
}

TestMutants = mutant_tests(Kit, MUTANTS)
