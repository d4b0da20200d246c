"""Plugins that raise, for tests of what that costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jackfield import AsyncEngine, SamplingParams, hookimpl
from jackfield.core.hook_versions import API_VERSION
from jackfield.core.registry import KINDS, Plugins, Provenance, load_plugins

BAD = Provenance("bad-dist", "2.0", "bad")


def bang(*_: Any, **__: Any) -> Any:
    raise RuntimeError("bang")


def plugin_with(**hooks: Callable[..., Any]) -> object:
    marked = {name: staticmethod(hookimpl(function)) for name, function in hooks.items()}
    return type("Bad", (), {"jackfield_api": API_VERSION, **marked})()


def plugins_with(**hooks: Callable[..., Any]) -> Plugins:
    plugins = load_plugins()
    plugins.add_plugin(plugin_with(**hooks), BAD)
    return plugins


def registering(kind: str, reference: object, **more: Any) -> Plugins:
    """Plugins of which one registers `reference` as "bad"."""

    def register(registry: Any) -> None:
        registry.add(more.pop("name", "bad"), reference, **more)

    return plugins_with(**{KINDS[kind]: register})


def with_field(checkpoint: Path, folder: Path, field: str, value: object) -> Path:
    """The same checkpoint, with another value in its config.json."""
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, field: value}))
    return folder


async def texts(engine: AsyncEngine, **options: Any) -> int:
    """Tokens of a request."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, **options)
    *_, last = [output async for output in engine.generate([5, 6, 7], params)]
    return len(last.outputs[0].token_ids)


async def settled(engine: AsyncEngine) -> None:
    """No transfer holds a block any more."""
    async with asyncio.timeout(300):
        while engine.stats().kv_blocks_used:
            await asyncio.sleep(0.001)
    engine.core.scheduler.check_invariants()
