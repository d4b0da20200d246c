"""Listing of what is plugged in: kind, name, origin, and whether it works here."""

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
    """A name, hook or plugin."""

    kind: str
    """One of `KINDS`, "hook" for events or routes, "plugin" for a whole one."""
    name: str
    distribution: str
    version: str
    status: str
    """"works here" or why not; "registered" if not checked. For a plugin: import time and warnings,
    or why it was left out."""
    plugin: str


def inventory(plugins: Plugins, *, check: bool = True) -> list[Row]:
    """Return a row per registered name, per hook without names, and per plugin, ending with those
    left out.

    `check`: import each, verify that it implements its kind, and call its `supports` or
    `unavailable`. Otherwise nothing is imported.
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
    """Yield a plugin's hooks without names: events, routes, metrics."""
    plugin = plugins.manager.get_plugin(provenance.plugin)
    for caller in plugins.manager.get_hookcallers(plugin) or ():
        if caller.name not in KINDS.values():
            yield caller.name


@contextlib.contextmanager
def output_aside() -> Iterator[None]:
    """Redirect plugins' prints during import to standard error."""
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _row(kind: str, name: str, provenance: Provenance, status: str) -> Row:
    where = provenance
    return Row(kind, name, where.distribution, where.version, status, where.entry_point)


def _summary(plugin: LoadedPlugin) -> str:
    heavy = f", with {', '.join(plugin.heavy)}" if plugin.heavy else ""
    took = f"imported in {plugin.seconds * 1e3:.1f} ms{heavy}"
    return "; ".join([took, *(f"warning: {remark}" for remark in plugin.remarks)])


def _status(registry: Registry[Any], name: str) -> str:
    try:
        plugin = registry.load(name)
    except PluginError as error:
        return f"does not load: {error.__cause__ or error}"
    try:
        reason = _refusal(registry.kind, plugin)
    except Exception as error:
        return f"not here: it raised {type(error).__name__}: {error}"
    return "works here" if reason is None else f"not here: {reason}"


def _refusal(kind: str, plugin: Any) -> str | None:
    """Return why a plugin does not support this machine or its default dtype, if known."""
    reason: str | None
    if kind == "structured_backend":
        reason = plugin.unavailable()
        return reason
    if kind not in ("attention_backend", "latent_attention_backend", "operations", "quantization"):
        return None
    import torch

    from ..core.protocols.attention import AttentionSpec
    from ..core.protocols.latent_attention import LatentAttentionSpec
    from ..core.worker.selection import attention_refusal

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if kind == "attention_backend":
        spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=128, scale=0.1)
        reason = attention_refusal(plugin, spec, device, dtype)
    elif kind == "latent_attention_backend":
        latent = LatentAttentionSpec(
            num_heads=16, latent_dim=512, rope_dim=64, nope_dim=128, value_dim=128, scale=0.1
        )
        reason = attention_refusal(plugin, latent, device, dtype)
    else:
        reason = plugin.supports(device, dtype)
    return reason
