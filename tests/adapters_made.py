"""Random adapters that PEFT itself makes, and PEFT's own results with them."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import peft
import torch

from helpers import reference_model

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(
    model: Path | Any, folder: Path, *, seed: int = 0, spread: float = 0.2, **settings: Any
) -> Path:
    """Save a random adapter of a checkpoint's model, and return its folder.

    model: the checkpoint's folder, or its transformers model, which is left as it was; settings:
    fields of `peft.LoraConfig`; spread: deviation of the trained numbers from the untrained ones.
    Nothing that is trained has the value that training begins with.
    """
    base = reference_model(model) if isinstance(model, Path) else model
    settings = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(base, peft.LoraConfig(**settings))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(spread * noise.to(parameter))
        shutil.rmtree(folder, ignore_errors=True)
        adapted.save_pretrained(folder)
        adapted.unload()
    (folder / "README.md").unlink(missing_ok=True)
    return folder


def adapted_model(model: Path, adapter: Path) -> Any:
    """Return PEFT's float32 model of a checkpoint with an adapter that was saved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(reference_model(model), adapter).eval()


def merged_weights(model: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint's transformers model with an adapter merged by PEFT, by
    transformers' names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = adapted_model(model, adapter).merge_and_unload()
    return {name: weight.detach() for name, weight in merged.state_dict().items()}
