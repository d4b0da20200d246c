"""Weight loaders and checkpoint formats that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_weight_loaders(registry: Any) -> None:
    registry.add("safetensors", "jackfield.plugins.loaders.safetensors:SafetensorsLoader")
    registry.add("gguf", "jackfield.plugins.loaders.gguf:GgufLoader")
    registry.add("sharded_state", "jackfield.plugins.loaders.sharded_state:ShardedStateLoader")
    registry.add("dummy", "jackfield.plugins.loaders.dummy:DummyLoader")
    registry.add("pt", "jackfield.plugins.loaders.pt:PtLoader")
    registry.add("mistral", "jackfield.plugins.loaders.mistral.weights:MistralLoader")
    registry.add("tensorizer", "jackfield.plugins.loaders.tensorizer:TensorizerLoader")
    registry.add("runai_streamer", "jackfield.plugins.loaders.runai_streamer:RunaiStreamerLoader")


@hookimpl
def register_checkpoint_formats(registry: Any) -> None:
    registry.add("mistral", "jackfield.plugins.loaders.mistral.format:MistralFormat")
    registry.add("tiktoken", "jackfield.plugins.loaders.tiktoken_format:TiktokenFormat")
