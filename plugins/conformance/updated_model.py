"""A model that takes other weights in place computes what a fresh one does."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ...core.config import EngineConfig
from ...core.loading.model_config import resolve_model_config
from ...core.loading.second_model import SecondModel
from ...core.parallel.ranks import ONE_RANK
from ...core.registry import Plugins
from .paged_model import PagedModel, example_prompts

WEIGHTS = "model.safetensors"


def check_update(folder: Path, plugins: Plugins) -> None:
    """Compare the logits of a model of `folder` after an update, tensor by tensor, with those of a
    fresh model: the same bits. Nothing is left of the old weights, wherever a layer keeps what it
    derives of them."""
    with tempfile.TemporaryDirectory() as other_name:
        other = Path(other_name) / "other"
        shutil.copytree(folder, other)
        tensors = _changed(load_file(folder / WEIGHTS))
        save_file(tensors, other / WEIGHTS, metadata={"format": "pt"})
        fresh = PagedModel(other, "float32", plugins=plugins)
    model = PagedModel(folder, "float32", plugins=plugins)
    prompt = example_prompts()[2]
    before = model.run({0: prompt})[0]
    config = EngineConfig(model=str(folder), device=model.device.type, dtype="float32")  # type: ignore[arg-type]
    with torch.inference_mode():
        second = SecondModel(
            plugins, config, resolve_model_config(config, plugins), model.device,
            model.operations, ONE_RANK, model.tensors,
        )  # fmt: skip
        for name, tensor in tensors.items():
            second.add(name, tensor)
        second.finish()
        second.apply()
    after, want = model.run({1: prompt})[1], fresh.run({1: prompt})[1]
    assert torch.equal(after, want), "something of the old weights is left after an update"
    assert not torch.equal(after, before), "the update has changed nothing"


def _changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    return {
        name: tensor * (1 + 0.3 * torch.rand_like(tensor)) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
