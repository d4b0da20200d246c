"""`WeightLoaderKit`: whether a weight loader fills a model completely from a checkpoint.

    class TestMine(WeightLoaderKit):
        name = "mine"                                 # as registered: `--load-format mine`

        def write(self, tensors, folder):             # a checkpoint in your format
            store(folder / "weights.mine", tensors)

With `name` alone the checkpoint is one of safetensors. The model is a tiny Llama with biases, on
the CPU; what a checkpoint calls its tensors is what `transformers` calls them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ...core.config import EngineConfig
from ...core.engine.async_engine import AsyncEngine
from ...core.errors import ConfigError, LoadError
from ...core.loading.model_config import resolve_model_config
from ...core.loading.quantize import choose_method, place_layers, quantized_layers
from ...core.loading.weight_map import ParameterFiller
from ...core.nn.context import BuildContext
from ...core.nn.operations import Operations
from ...core.sampling_params import OutputKind, SamplingParams
from .kit import Kit

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "initializer_range": 0.2, "attention_bias": True,
}  # fmt: skip
CONFIG_FILES = frozenset({"config.json", "generation_config.json"})


class WeightLoaderKit(Kit):
    """Subclass it, and implement how a checkpoint is written."""

    kind = "weight_loader"
    reads: ClassVar[bool] = True
    """Whether it reads a checkpoint. If not, it generates weights, and is only checked for whether
    all are present and usable in computations."""
    config: ClassVar[Mapping[str, Any]] = {}
    """Differences from the kit's model configuration."""
    tolerance: ClassVar[float] = 0.0
    """Allowed deviation of a parameter from the checkpoint, relative to the largest: more than 0 if
    the format rounds."""

    def write(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Store these tensors in the format. `folder` has a config.json."""
        save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})

    def write_in_parts(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Store the same in several files, if the format supports that."""
        if type(self).write is not WeightLoaderKit.write:
            pytest.skip("the kit was not told how to write several files: give it write_in_parts")
        names = sorted(tensors)
        files = {f"part-{n}.safetensors": names[n::3] for n in range(3)}
        for file, part in files.items():
            save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        index = {name: file for file, part in files.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    def called(self, name: str) -> str:
        """Return the name in errors of a tensor that `transformers` calls `name`."""
        return name

    # -------------------------------------------------------------- what tests are made of

    @pytest.fixture
    def tensors(self) -> dict[str, torch.Tensor]:
        """The checkpoint; all its numbers differ from those of a new parameter."""
        return dict(_tensors(json.dumps({**CONFIG, **self.config})))

    def lay(self, folder: Path, **changes: Any) -> Path:
        """Write a folder with only a config.json."""
        import transformers

        folder.mkdir(parents=True, exist_ok=True)
        config = transformers.LlamaConfig(**{**CONFIG, **self.config, **changes})
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        return folder

    def checkpoint(self, folder: Path, tensors: Mapping[str, torch.Tensor], **changes: Any) -> Path:
        """Write a folder as a user has it."""
        self.lay(folder, **changes)
        self.write(tensors, folder)
        return folder

    def empty_model(self, folder: Path, **options: Any) -> tuple[nn.Module, Any, Any]:
        """Return the model before it is loaded, every number NaN, and its two configurations."""
        settings: dict[str, Any] = {
            "device": "cpu", "dtype": "float32", "load_format": self.name,
            "skip_tokenizer_init": True, **options,
        }  # fmt: skip
        config = EngineConfig(model=str(folder), **settings)
        model_config = resolve_model_config(config)
        plugins = self.plugins()
        method = choose_method(plugins, config, model_config, CPU)
        build = BuildContext(
            CPU, model_config.dtype, Operations(), defer_weights=method is not None
        )
        model: nn.Module = plugins["model"].load("LlamaForCausalLM")(model_config, build)
        if method is not None:
            place_layers(model, model.weight_map, method, build)  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        return model, config, model_config

    def load(self, folder: Path, **options: Any) -> nn.Module:
        """Load as the worker does. Raises what the loader raises."""
        model, config, model_config = self.empty_model(folder, **options)
        self.registered()(config, model_config).load(model, CPU)
        return model

    def expected(self, folder: Path, tensors: Mapping[str, torch.Tensor], **options: Any) -> Any:
        """Return the model filled from the tensors themselves."""
        model = self.empty_model(folder, **options)[0]
        filler = ParameterFiller(model, model.weight_map)  # type: ignore[arg-type]
        for name, tensor in tensors.items():
            filler.fill(name, tensor)
        filler.finish()
        return model

    def same(self, actual: nn.Module, expected: nn.Module) -> None:
        """Compare every parameter of two models."""
        expected_parameters = dict(expected.named_parameters())
        parameters = dict(actual.named_parameters())
        assert parameters.keys() == expected_parameters.keys()
        for name, parameter in parameters.items():
            other = expected_parameters[name]
            assert parameter.dtype == other.dtype, f"{name} is {parameter.dtype} now"
            assert parameter.shape == other.shape and parameter.device == other.device, name
            assert not parameter.isnan().any(), f"{name} was not filled"
            # Numbers that are rounded twice may also be off by a step of the model's dtype.
            share = self.tolerance + (self.tolerance > 0) * torch.finfo(other.dtype).eps
            bound = share * float(other.abs().max())
            assert float((parameter - other).abs().max()) <= bound, (
                f"{name} is not the checkpoint's"
            )

    def only_reading(self) -> None:
        if not self.reads:
            pytest.skip("it reads no checkpoint")

    @contextlib.contextmanager
    def refused(self, name: str = "") -> Iterator[None]:
        """Expect a LoadError that names the tensor."""
        with pytest.raises(LoadError) as caught:
            yield
        assert self.called(name) in str(caught.value), f"{name} is not named: {caught.value}"

    # -------------------------------------------------------------- what is loaded

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_every_parameter_is_filled(self, tensors: Any, dtype: str, tmp_path: Path) -> None:
        """Parameters are filled in place, in the model's dtype, with the checkpoint's numbers."""
        folder = self.checkpoint(tmp_path, tensors)
        model, config, model_config = self.empty_model(folder, dtype=dtype)
        before = dict(model.named_parameters())
        self.registered()(config, model_config).load(model, CPU)
        for name, parameter in model.named_parameters():
            assert parameter is before[name], f"{name} is another parameter now"
            assert torch.isfinite(parameter).all(), f"{name} was not filled"
            if not name.endswith("bias"):
                assert parameter.any(), f"{name} is zero"
        if self.reads:
            self.same(model, self.expected(folder, tensors, dtype=dtype))

    def test_a_checkpoint_in_half_precision_is_widened(self, tensors: Any, tmp_path: Path) -> None:
        self.only_reading()
        stored = {name: tensor.to(torch.float16) for name, tensor in tensors.items()}
        folder = self.checkpoint(tmp_path, stored)
        self.same(self.load(folder), self.expected(folder, stored))

    def test_tied_embeddings_need_no_head(self, tensors: Any, tmp_path: Path) -> None:
        if self.reads:
            tensors = {name: part for name, part in tensors.items() if name != "lm_head.weight"}
        folder = self.checkpoint(tmp_path, tensors, tie_word_embeddings=True)
        model = self.load(folder, dtype="float32")
        if self.reads:
            self.same(model, self.expected(folder, tensors))

    def test_several_files_are_one_checkpoint(self, tensors: Any, tmp_path: Path) -> None:
        self.only_reading()
        folder = self.lay(tmp_path)
        self.write_in_parts(tensors, folder)
        self.same(self.load(folder), self.expected(folder, tensors))

    def test_quantized_layers_get_their_tensors(self, tensors: Any, tmp_path: Path) -> None:
        """Layers that a quantization method has taken are each processed once."""
        folder = self.checkpoint(tmp_path, tensors)
        layers = quantized_layers(self.load(folder, quantization="int8"))
        assert layers
        expected = {}
        if self.reads:
            expected = quantized_layers(self.expected(folder, tensors, quantization="int8"))
        for name, layer in layers.items():
            assert layer.processed, f"{name} was never processed"
            eye = torch.eye(layer.spec.in_features)
            product = layer(eye)
            assert torch.isfinite(product).all()
            if self.reads:
                dense = expected[name](eye)
                # A number near a tie may be rounded to the next of 127 steps.
                bound = (1e-5 + 2 * (self.tolerance > 0) / 127) * float(dense.abs().max())
                assert float((product - dense).abs().max()) <= bound, name

    def test_loading_twice_gives_the_same(self, tensors: Any, tmp_path: Path) -> None:
        folder = self.checkpoint(tmp_path, tensors)
        first, second = self.load(folder), self.load(folder)
        for left, other in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(left, other)

    def test_the_checkpoint_is_only_read(self, tensors: Any, tmp_path: Path) -> None:
        folder = self.checkpoint(tmp_path, tensors)
        before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        with torch.no_grad():
            for parameter in self.load(folder).parameters():
                parameter.add_(1.0)
        after = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        assert after == before

    def test_an_engine_starts_with_it(self, tensors: Any, tmp_path: Path) -> None:
        folder = self.checkpoint(tmp_path, tensors)
        params = SamplingParams(
            temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1,
            output_kind=OutputKind.FINAL_ONLY,
        )  # fmt: skip

        async def serve() -> Any:
            config = EngineConfig(
                model=str(folder), device="cpu", dtype="float32", load_format=self.name,
                skip_tokenizer_init=True, max_model_len=32, num_gpu_blocks_override=8,
            )  # fmt: skip
            async with AsyncEngine(config, plugins=self.plugins()) as engine:
                return [output async for output in engine.generate([5, 6, 7], params)][-1]

        output = asyncio.run(serve())
        assert output.error is None and len(output.outputs[0].token_ids) == 4

    # -------------------------------------------------------------- what is refused

    def test_a_missing_tensor_is_refused_by_name(self, tensors: Any, tmp_path: Path) -> None:
        self.only_reading()
        for number, name in enumerate(
            ("model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "lm_head.weight")
        ):
            remaining = {key: part for key, part in tensors.items() if key != name}
            folder = self.checkpoint(tmp_path / str(number), remaining)
            with self.refused(name):
                self.load(folder)

    def test_a_tensor_without_a_place_is_refused_by_name(
        self, tensors: Any, tmp_path: Path
    ) -> None:
        self.only_reading()
        name = "model.layers.1.mlp.side_proj.weight"
        folder = self.checkpoint(tmp_path, {**tensors, name: torch.ones(64, 64)})
        with self.refused(name):
            self.load(folder)

    def test_a_tensor_of_another_shape_is_refused_by_name(
        self, tensors: Any, tmp_path: Path
    ) -> None:
        """Refuse also a tensor that could be broadcast, or that has the right number of
        elements."""
        self.only_reading()
        name = "model.layers.0.mlp.down_proj.weight"
        whole = tensors[name]
        for number, wrong in enumerate((whole[:-32], whole.t(), whole[:1])):
            changed = {**tensors, name: wrong.contiguous()}
            folder = self.checkpoint(tmp_path / str(number), changed)
            with self.refused(name):
                self.load(folder)

    def test_what_is_no_checkpoint_is_refused(self, tensors: Any, tmp_path: Path) -> None:
        """Refuse files truncated anywhere, empty, or of other bytes; and a folder without any."""
        self.only_reading()
        folder = self.checkpoint(tmp_path, tensors)
        whole = {
            file: file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file() and file.name not in CONFIG_FILES
        }
        largest = max(whole, key=lambda file: len(whole[file]))
        data = whole[largest]
        damaged = (data[: len(data) // 2], data[:-3], data[:6], b"", b"\xff" * 300)
        for bytes_ in damaged:
            largest.write_bytes(bytes_)
            with pytest.raises((LoadError, ConfigError)):
                self.load(folder)
        for file in whole:
            file.unlink()
        with pytest.raises((LoadError, ConfigError)):
            self.load(folder)


@functools.cache
def _tensors(config: str) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a random Llama, under `transformers` names."""
    import transformers

    torch.manual_seed(13)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**json.loads(config)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
