"""Completes `speculative_config` from the draft checkpoint."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from ..config import EngineConfig
from ..config.speculative_config import AUTO, FIELD, MOST_DRAFTS
from ..errors import CheckpointNotFound, ConfigError, LoadError
from ..loading.checkpoint_folder import checkpoint_folder
from ..loading.json_file import read_object
from ..loading.model_config import ModelConfig
from ..registry import Plugins

logger = logging.getLogger("jackfield.engine")


def resolve_speculation(
    config: EngineConfig, model_config: ModelConfig, plugins: Plugins
) -> EngineConfig:
    """Return the configuration with method, model and number of drafts. Raises ConfigError with
    what is missing.
    """
    speculation = config.speculative_config
    if speculation is None:
        return config
    method, raw = speculation.method, None
    if method == AUTO:
        method = _carried(dict(model_config.hf_config.to_dict()), plugins)
        if method is None:
            logger.info("speculative_config: the checkpoint has no drafting layers; no drafts")
            return msgspec.structs.replace(config, speculative_config=None)
        logger.info("speculative_config: the checkpoint drafts with %s", method)
    if method is None:
        raw = _draft_config(str(speculation.model), speculation.revision)
        method = _recognized(raw, str(speculation.model), plugins)
        logger.info("speculative_config: %s drafts as %s", speculation.model, method)
    speculator = plugins["speculator"].load(method)
    source = speculator.checkpoint
    beside = model_config.path / method
    if source == "draft" and speculation.model is None and (beside / "config.json").is_file():
        speculation = msgspec.structs.replace(speculation, model=str(beside))
    if source == "draft" and speculation.model is None:
        raise ConfigError(
            f"{FIELD}: {method!r} drafts with a checkpoint of its own; name its folder or hub name "
            f"as model, or put it into {beside}",
            param=FIELD,
        )
    if source == "none" and speculation.model is not None:
        raise ConfigError(
            f"{FIELD}: {method!r} has no weights; leave model ({speculation.model!r}) out",
            param=FIELD,
        )
    count = speculation.num_speculative_tokens
    if raw is None and speculation.model is not None:
        raw = _draft_config(speculation.model, speculation.revision)
    if count is None:
        if raw is None:
            raw = dict(model_config.hf_config.to_dict()) if source == "target" else {}
        with plugins["speculator"].calling(method, "default_drafts"):
            count = speculator.default_drafts(raw)
        if not count:
            raise ConfigError(
                f"{FIELD}: set num_speculative_tokens; {method!r} has no number of its own",
                param=FIELD,
            )
        count = min(count, MOST_DRAFTS)
    ranks = speculation.draft_tensor_parallel_size
    if ranks not in (None, 1, config.tensor_parallel_size):
        raise ConfigError(
            f"{FIELD}: draft_tensor_parallel_size is {ranks}; it must be 1, or the target's "
            f"tensor_parallel_size, {config.tensor_parallel_size}",
            param=FIELD,
        )
    resolved = msgspec.structs.replace(speculation, method=method, num_speculative_tokens=count)
    return msgspec.structs.replace(config, speculative_config=resolved)


def _carried(config: dict[str, Any], plugins: Plugins) -> str | None:
    """Return the method whose weights are in the served checkpoint; None: there is none."""
    registry = plugins["speculator"]
    methods: list[str] = []
    for entry in registry.entries():
        speculator = registry.load(entry.name)
        with registry.calling(entry.name, "carried_by"):
            methods += [entry.name] if speculator.carried_by(config) else []
    # Some have longer names, too.
    return min(methods, key=len, default=None)


def _draft_config(model: str, revision: str | None) -> dict[str, Any]:
    try:
        return read_object(checkpoint_folder(model, revision) / "config.json")
    except (CheckpointNotFound, LoadError) as error:
        raise ConfigError(f"{FIELD}: {error.message}", param=FIELD) from error


def _recognized(raw: dict[str, Any], model: str, plugins: Plugins) -> str:
    """Return the method of a draft checkpoint."""
    registry = plugins["speculator"]
    surest: dict[int, list[str]] = {}
    for entry in registry.entries():
        speculator = registry.load(entry.name)
        with registry.calling(entry.name, "recognizes"):
            surest.setdefault(int(speculator.recognizes(raw)), []).append(entry.name)
    methods = surest[max(surest)]
    if not max(surest) or len(methods) > 1:
        what = f"are {' and '.join(methods)}" if max(surest) else "is no method"
        raise ConfigError(
            f"{FIELD}: there {what} for {model!r} (architectures {raw.get('architectures')!r}, "
            f"model_type {raw.get('model_type')!r}); name the method",
            param=FIELD,
        )
    return methods[0]
