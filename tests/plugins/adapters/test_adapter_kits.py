"""The kits of adapter formats and resolvers, with what is in the box; and that they find faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from jackfield import hookimpl
from jackfield.core.config import EngineConfig
from jackfield.plugins.conformance.adapters import AdapterFormatKit, AdapterResolverKit


class TestPeft(AdapterFormatKit):
    name = "peft"

    def write(self, folder: Path) -> None:
        fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        name = "base_model.model.model.layers.0.self_attn.q_proj"
        generator = torch.Generator().manual_seed(1)
        tensors = {
            f"{name}.lora_A.weight": torch.randn((2, 6), generator=generator),
            f"{name}.lora_B.weight": torch.randn((10, 2), generator=generator),
        }
        save_file(tensors, folder / "adapter_model.safetensors")


class TestFolder(AdapterResolverKit):
    name = "folder"

    @pytest.fixture(autouse=True)
    def served(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        options = {"lora_resolver_cache_dir": str(tmp_path)}
        monkeypatch.setattr(type(self), "options", options)


class Careless:
    """Joins a folder and a name, as they are."""

    def __init__(self, config: EngineConfig) -> None: ...

    async def resolve(self, name: str, base_model: str) -> Path | None:
        path = Path.cwd() / name
        return path if path.exists() else None


class Plugin:
    @hookimpl
    def register_adapter_resolvers(self, registry: Any) -> None:
        registry.add("careless", Careless)


def test_a_resolver_whose_names_leave_its_folder_is_found() -> None:
    class Checked(AdapterResolverKit):
        name = "careless"
        plugin = Plugin()

    with pytest.raises(AssertionError, match=r"^\.\."):
        Checked().test_names_that_are_none_are_unknown()
