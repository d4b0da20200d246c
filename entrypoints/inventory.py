"""What is plugged in, as rows: kind, name, where it came from, and whether it works here."""

from __future__ import annotations

from typing import Any

import msgspec

from ..core.errors import PluginError
from ..core.registry import KINDS, Plugins, Provenance, Registry


class Row(msgspec.Struct, frozen=True):
    """One name, or one plugin that was left out."""

    kind: str
    """One of `KINDS`; "hook" for an event or routes; "plugin" for one that was left out."""
    name: str
    distribution: str
    version: str
    status: str
    """"works here", or why not; "registered" where nobody looked."""


def inventory(plugins: Plugins, *, check: bool = True) -> list[Row]:
    """A row a name, then the hooks that are no names, then the plugins that were left out.

    `check`: import each one and ask those that know (`supports`) whether they work here. Without
    it nothing is imported.
    """
    rows = []
    for registry in plugins.registries.values():
        for entry in registry.entries():
            status = _status(registry, entry.name) if check else "registered"
            rows.append(_row(registry.kind, entry.name, entry.provenance, status))
    registration = set(KINDS.values())
    for plugin_name, provenance in plugins.provenance.items():
        plugin = plugins.manager.get_plugin(plugin_name)
        for caller in plugins.manager.get_hookcallers(plugin) or ():
            if caller.name not in registration:
                status = "works here" if check else "registered"
                rows.append(_row("hook", caller.name, provenance, status))
    for left_out in (*plugins.failed, *plugins.unwanted):
        provenance = left_out.provenance
        status = f"left out: {left_out.error}"
        rows.append(_row("plugin", provenance.entry_point, provenance, status))
    return rows


def _row(kind: str, name: str, provenance: Provenance, status: str) -> Row:
    return Row(kind, name, provenance.distribution, provenance.version, status)


def _status(registry: Registry[Any], name: str) -> str:
    try:
        loaded = registry.load(name)
        reason = _refusal(registry.kind, loaded)
    except PluginError as error:
        return f"does not load: {error.__cause__ or error}"
    except Exception as error:
        return f"not here: supports raised {type(error).__name__}: {error}"
    return "works here" if reason is None else f"not here: {reason}"


def _refusal(kind: str, loaded: Any) -> str | None:
    """What a plugin that knows says against this machine and its usual dtype."""
    if kind not in ("attention_backend", "operations", "quantization"):
        return None
    import torch

    from ..core.protocols import AttentionSpec
    from ..core.worker.selection import attention_refusal

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    reason: str | None
    if kind == "attention_backend":
        spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=128, scale=0.1)
        reason = attention_refusal(loaded, spec, device, dtype)
    else:
        reason = loaded.supports(device, dtype)
    return reason
