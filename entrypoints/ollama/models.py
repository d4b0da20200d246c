"""What Ollama's routes say of the served model."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from ...core.engine.async_engine import AsyncEngine
from ...core.loading.model_config import ModelConfig

FOREVER = "9999-12-31T23:59:59Z"
"""When a model is unloaded that stays until the server ends."""
TAG = ":latest"
PARAMETERS = {"repetition_penalty": "repeat_penalty"}
"""Fields of SamplingParams → parameters of a Modelfile, if other."""


class CheckpointFacts(msgspec.Struct, frozen=True):
    """Facts of a checkpoint's folder."""

    digest: str
    """Digest of the names and sizes of its files, and of its configuration."""
    num_bytes: int
    modified_at: str
    num_parameters: int | None
    """None if its weights are packed, or not in safetensors."""


def tagged(name: str) -> str:
    """Return a model's name with a tag, as Ollama's clients expect it in lists."""
    return name if ":" in name else name + TAG


class Facts:
    """The served checkpoint's facts, read once."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._read: CheckpointFacts | None = None

    async def read(self) -> CheckpointFacts:
        """Raises OSError if the folder has gone."""
        if self._read is None:
            config = self._engine.model_config
            counts = config.quantization_config is None
            self._read = await asyncio.to_thread(_read, config.path, counts)
        return self._read


def _read(folder: Path, counts: bool) -> CheckpointFacts:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    sizes = {path.name: path.stat().st_size for path in files}
    digest = hashlib.sha256(repr(sizes).encode())
    if (config := folder / "config.json").is_file():
        digest.update(config.read_bytes())
    newest = max((path.stat().st_mtime for path in files), default=0.0)
    weights = [path for path in files if path.suffix == ".safetensors"]
    number = sum(map(_num_elements, weights)) if weights and counts else None
    modified = datetime.fromtimestamp(int(newest), UTC).isoformat().replace("+00:00", "Z")
    return CheckpointFacts(digest.hexdigest(), sum(sizes.values()), modified, number)


def _num_elements(file: Path) -> int:
    """Return the number of elements in a safetensors file, from its header."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = msgspec.json.decode(opened.read(size))
    return sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")


def details(config: ModelConfig, facts: CheckpointFacts, parent: str = "") -> dict[str, Any]:
    """parent: the base model of an adapter."""
    family = _family(config)
    method = (config.quantization_config or {}).get("quant_method")
    return {
        "parent_model": parent,
        "format": config.load_format,
        "family": family,
        "families": [family],
        "parameter_size": _human(facts.num_parameters),
        "quantization_level": method or str(config.dtype).removeprefix("torch."),
    }


def _family(config: ModelConfig) -> str:
    return str(getattr(config.hf_config, "model_type", "") or config.architecture)


def _human(number: int | None) -> str:
    if number is None:
        return ""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)


def capabilities(engine: AsyncEngine) -> list[str]:
    if engine.supported_tasks != ("generate",):
        return ["embedding"] if "embed" in engine.supported_tasks else []
    config = engine.config
    kinds = {"tools": config.tool_call_parser, "thinking": config.reasoning_parser}
    vision = ["vision"] if "image" in engine.model_config.input_modalities else []
    return ["completion", *vision, *(name for name, parser in kinds.items() if parser is not None)]


def model_info(engine: AsyncEngine, facts: CheckpointFacts) -> dict[str, Any]:
    """Return facts under GGUF's names, which clients read."""
    config = engine.model_config
    family = _family(config)
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": engine.served_model_names[0],
        f"{family}.context_length": config.max_model_len,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.block_count": config.num_layers,
        f"{family}.attention.head_count": config.num_heads,
        f"{family}.attention.head_count_kv": config.num_kv_heads,
        f"{family}.vocab_size": config.vocab_size,
    }
    if facts.num_parameters is not None:
        info["general.parameter_count"] = facts.num_parameters
    return info


def parameters(config: ModelConfig) -> str:
    """Return the checkpoint's recommended sampling parameters, a line each."""
    return "\n".join(f"{name} {value}" for name, value in _parameters(config))


def _parameters(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    for name, value in config.sampling.values.items():
        yield PARAMETERS.get(name, name), value


def template(engine: AsyncEngine) -> str:
    """Return the chat template, "" without one."""
    tokenizer = engine.tokenizer
    return "" if tokenizer is None else tokenizer.chat_templates.get("default", "")
