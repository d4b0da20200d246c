"""Forms of adapters, and resolvers of their names, that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_adapter_formats(registry: Any) -> None:
    registry.add("peft", "jackfield.plugins.adapters.peft:PeftFormat")
    registry.add("gguf", "jackfield.plugins.adapters.gguf:GgufFormat")


@hookimpl
def register_adapter_resolvers(registry: Any) -> None:
    registry.add("folder", "jackfield.plugins.adapters.folder:FolderResolver")
