"""Checks of checkpoints that are configured otherwise, or incomplete, for `QuantizationKit`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from ...core.errors import ConfigError, LoadError
from ...core.loading.quantize import quantized_layers


class CheckpointChecks:
    """Part of `QuantizationKit`."""

    build: Any
    config: ClassVar[Mapping[str, Any]]
    dense: Any
    exact: ClassVar[float]
    ignore_field: ClassVar[str | None]
    inert: ClassVar[frozenset[str]]
    is_quantized: Any
    mismatched: ClassVar[Mapping[str, Any]]
    name: Any
    registered: Any
    set_config: Any

    def test_every_number_of_the_config_counts(self, checkpoint: Any) -> None:
        """The same tensors under another `group_size`, for example, are another weight, or
        refused."""
        folder, _ = checkpoint
        if not self.config:
            pytest.skip("there is no quantization_config")
        before = [self.dense(layer) for layer in quantized_layers(self.build(folder)).values()]
        for path, value in numbers(self.config):
            called = ".".join(path)
            if self.inert & {called, path[-1]}:
                continue
            self.set_config(folder, **replaced(self.config, path, 2 * value if value > 0 else 32))
            try:
                layers = quantized_layers(self.build(folder)).values()
                after = [self.dense(layer) for layer in layers]
            except (ConfigError, LoadError):
                continue
            finally:
                self.set_config(folder)
            same = len(before) == len(after) and all(map(torch.equal, before, after))
            assert not same, (
                f"another {called} changes nothing (if it should not, name it in inert)"
            )

    def test_mismatched_config_is_refused_by_the_fields_name(self, checkpoint: Any) -> None:
        """Check each wrong value separately."""
        folder, _ = checkpoint
        method = self.registered()
        for field, value in self.mismatched.items():
            wrong = {"quant_method": self.name, **self.config, field: value}
            with pytest.raises(ConfigError, match=field.rpartition(".")[2]) as caught:
                method.from_config(wrong)
            assert caught.value.param is not None
            assert field.rpartition(".")[2] in caught.value.param
        if self.mismatched and self.config:
            field, value = next(iter(self.mismatched.items()))
            self.set_config(folder, **{field: value})
            try:
                with pytest.raises(ConfigError, match=field):
                    self.build(folder)
            finally:
                self.set_config(folder)

    def test_missing_and_misshapen_tensors_are_named(self, checkpoint: Any, tmp_path: Path) -> None:
        """The error uses the checkpoint's names, or names the layer and what it lacks. A tensor may
        be missing without an error if it has no effect."""
        folder, _ = checkpoint
        tensors = load_file(folder / "model.safetensors")
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        victim = r"model\.layers\.1\.mlp\.(experts\.1\.)?down_proj\."
        names = [name for name in tensors if re.match(victim, name)]
        name = max(names, key=lambda n: tensors[n].numel())
        cut = {**tensors, name: tensors[name][:-1].contiguous()}
        save_file(cut, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(LoadError, match=name.replace(".", r"\.")):
            self.build(tmp_path)
        weights = {
            key: self.dense(layer_) for key, layer_ in quantized_layers(self.build(folder)).items()
        }
        for missing in names:
            cut = {key: tensor for key, tensor in tensors.items() if key != missing}
            save_file(cut, tmp_path / "model.safetensors", {"format": "pt"})
            try:
                layers = quantized_layers(self.build(tmp_path))
            except LoadError as error:
                layer, leaf = missing.split("down_proj.")
                named = f"{layer}down_proj" in str(error) and leaf in str(error)
                assert named, f"{missing} is not named: {error}"
                continue
            assert missing != name, f"{missing} may be missing, and nobody minds"
            for key, layer_ in layers.items():
                worst = (self.dense(layer_) - weights[key]).abs().max()
                bound = self.exact * weights[key].abs().max()
                assert worst <= bound, f"without {missing} there is another weight, and no error"

    def test_ignored_layers_stay_as_they_are(self, tmp_path: Path) -> None:
        """A layer in the format's ignore list is neither looked for nor rounded."""
        if self.ignore_field is None or not self.config:
            pytest.skip("the format has no such list")
        kit = self

        class Spared(type(kit)):  # type: ignore[misc]
            def is_quantized(self, layer: str) -> bool:
                return kit.is_quantized(layer) and "layers.1.mlp.down_proj" not in layer

        reference = Spared().write("Llama", tmp_path)
        spared = [*self.config.get(self.ignore_field, ()), "model.layers.1.mlp.down_proj"]
        self.set_config(tmp_path, **{self.ignore_field: spared})
        model = self.build(tmp_path)
        layers = quantized_layers(model)
        assert "model.layers.1.mlp.down_proj" not in layers
        assert "model.layers.0.mlp.down_proj" in layers
        parameter = model.get_parameter("model.layers.1.mlp.down_proj.weight")
        expected = reference.get_parameter("model.layers.1.mlp.down_proj.weight")
        torch.testing.assert_close(parameter.cpu(), expected.data, rtol=0, atol=0)

    def test_dummy_weights_can_be_made(self, checkpoint: Any) -> None:
        """`load_format=dummy` allows speed measurements without a checkpoint."""
        model = self.build(checkpoint[0], load_format="dummy")
        draw = torch.Generator().manual_seed(7)
        for layer in quantized_layers(model).values():
            x = torch.randn(2, layer.spec.in_features, generator=draw)
            result = layer(x.to(layer.spec.device))
            assert torch.isfinite(result).all() and result.any(), layer.spec.prefix


def numbers(config: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield path and value of each whole number in a configuration, except in lists."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from (((name, *path), number) for path, number in numbers(value))
        elif isinstance(value, int) and not isinstance(value, bool):
            yield (name,), value


def replaced(config: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return the configuration with another value at a path."""
    name, *rest = path
    return {**config, name: replaced(config[name], tuple(rest), value) if rest else value}
