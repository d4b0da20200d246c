"""Random adapters that PEFT itself makes, and PEFT's own results with them.

PEFT is imported where it is called: every process collects the tests, and the import takes 4 s.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from helpers import reference_model

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


def make_adapter(
    model: Path | Any, folder: Path, *, seed: int = 0, spread: float = 0.2, **settings: Any
) -> Path:
    """Save a random adapter of a checkpoint's model, and return its folder.

    model: the checkpoint's folder, or its transformers model, which is left as it was; settings:
    fields of `peft.LoraConfig`; spread: deviation of the trained numbers from the untrained ones.
    Nothing that is trained has the value that training begins with.
    """
    import peft

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
    import peft

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


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> Path:
    """Write an adapter as it is given, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**fields, **settings}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def q_proj_tensors(name: str = Q_PROJ, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return A [2, 6] and B [10, 2] of a layer, and more tensors of it."""
    generator = torch.Generator().manual_seed(5)
    return {
        f"{name}.lora_A.weight": torch.randn((2, 6), generator=generator),
        f"{name}.lora_B.weight": torch.randn((10, 2), generator=generator),
        **{f"{name}.{key}": tensor for key, tensor in more.items()},
    }
