"""What is plugged in, as rows: kind, name, where it came from, and whether it works here."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from ..core.errors import PluginError
from ..core.registry import KINDS, LoadedPlugin, Plugins, Provenance, Registry


class Row(msgspec.Struct, frozen=True):
    """One name, hook or plugin."""

    kind: str
    """One of `KINDS`; "hook" for an event or routes; "plugin" for one as a whole."""
    name: str
    distribution: str
    version: str
    status: str
    """"works here", or why not; "registered" where nobody looked; of a plugin, what importing it
    took and what is odd about it, or why it was left out."""
    plugin: str
    """The entry point that brought it."""


def inventory(plugins: Plugins, *, check: bool = True) -> list[Row]:
    """A row a name, then the hooks that are no names, then one a plugin, those left out last.

    `check`: import each one, see whether it is what its kind must be, and ask those that know
    (`supports`, `unavailable`) whether they work here. Without it nothing is imported.
    """
    rows = []
    for registry in plugins.registries.values():
        for entry in registry.entries():
            status = _status(registry, entry.name) if check else "registered"
            rows.append(_row(registry.kind, entry.name, entry.provenance, status))
    for plugin in plugins.loaded.values():
        status = "works here" if check else "registered"
        for hook in hooks_of(plugins, plugin.provenance):
            rows.append(_row("hook", hook, plugin.provenance, status))
    for plugin in plugins.loaded.values():
        rows.append(
            _row("plugin", plugin.provenance.entry_point, plugin.provenance, _summary(plugin))
        )
    for left_out in (*plugins.failed, *plugins.unwanted):
        provenance = left_out.provenance
        status = f"left out: {left_out.error}"
        rows.append(_row("plugin", provenance.entry_point, provenance, status))
    return rows


def hooks_of(plugins: Plugins, provenance: Provenance) -> Iterator[str]:
    """The hooks of a plugin that register no names: events, routes, metrics."""
    plugin = plugins.manager.get_plugin(provenance.plugin)
    for caller in plugins.manager.get_hookcallers(plugin) or ():
        if caller.name not in KINDS.values():
            yield caller.name


@contextlib.contextmanager
def output_aside() -> Iterator[None]:
    """What plugins print while they are imported goes to standard error: ours is for programs."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _row(kind: str, name: str, provenance: Provenance, status: str) -> Row:
    where = provenance
    return Row(kind, name, where.distribution, where.version, status, where.entry_point)


def _summary(plugin: LoadedPlugin) -> str:
    heavy = f", with {', '.join(plugin.heavy)}" if plugin.heavy else ""
    took = f"imported in {plugin.seconds * 1e3:.1f} ms{heavy}"
    return "; ".join([took, *(f"warning: {remark}" for remark in plugin.remarks)])


def _status(registry: Registry[Any], name: str) -> str:
    try:
        loaded = registry.load(name)
    except PluginError as error:
        return f"does not load: {error.__cause__ or error}"
    try:
        reason = _refusal(registry.kind, loaded)
    except Exception as error:
        return f"not here: it raised {type(error).__name__}: {error}"
    return "works here" if reason is None else f"not here: {reason}"


def _refusal(kind: str, loaded: Any) -> str | None:
    """What a plugin that knows says against this machine and its usual dtype."""
    reason: str | None
    if kind == "structured_backend":
        reason = loaded.unavailable()
        return reason
    if kind not in ("attention_backend", "operations", "quantization"):
        return None
    import torch

    from ..core.protocols import AttentionSpec
    from ..core.worker.selection import attention_refusal

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if kind == "attention_backend":
        spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=128, scale=0.1)
        reason = attention_refusal(loaded, spec, device, dtype)
    else:
        reason = loaded.supports(device, dtype)
    return reason
