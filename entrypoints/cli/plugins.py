"""`jackfield plugins`: each name, its kind, where it came from, and whether it works here."""

from __future__ import annotations

import json
import sys
from typing import Any

from ...core.errors import PluginError
from ...core.registry import Plugins, load_plugins
from .options import Parser


def run(argv: list[str]) -> int:
    """→ exit status: 0, or 1 when plugins clash."""
    parser = Parser(prog="jackfield plugins", description="List what is plugged in.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--check", action="store_true", help="import each one, to see if it works")
    args = parser.parse_args(argv)
    try:
        plugins = load_plugins()
    except PluginError as error:
        print(f"jackfield: {error}", file=sys.stderr)
        return 1
    rows = table(plugins, check=args.check)
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    columns = ("kind", "name", "distribution", "version", "status")
    widths = [max(len(c), *(len(row[c]) for row in rows)) for c in columns]
    for row in [dict(zip(columns, columns, strict=True)), *rows]:
        cells = (row[c].ljust(w) for c, w in zip(columns, widths, strict=True))
        print("  ".join(cells).rstrip())
    return 0


def table(plugins: Plugins, *, check: bool) -> list[dict[str, str]]:
    """A row a name; then the plugins that were left out."""
    rows: list[dict[str, str]] = []
    for kind, registry in plugins.registries.items():
        for entry in registry.entries():
            rows.append(
                {
                    "kind": kind,
                    "name": entry.name,
                    "distribution": entry.provenance.distribution,
                    "version": entry.provenance.version,
                    "status": _status(registry, entry.name) if check else "registered",
                }
            )
    for failed in plugins.failed:
        rows.append(
            {
                "kind": "(plugin)",
                "name": failed.provenance.entry_point,
                "distribution": failed.provenance.distribution,
                "version": failed.provenance.version,
                "status": f"left out: {failed.error}",
            }
        )
    return rows


def _status(registry: Any, name: str) -> str:
    try:
        loaded = registry.load(name)
    except PluginError as error:
        return f"does not load: {error.__cause__ or error}"
    if registry.kind != "attention_backend":
        return "works here"
    return _attention_status(loaded)


def _attention_status(backend: Any) -> str:
    import torch

    from ...core.protocols import AttentionSpec

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=128, scale=0.1)
    reason = backend.supports(spec, device, dtype)
    return "works here" if reason is None else f"not here: {reason}"
