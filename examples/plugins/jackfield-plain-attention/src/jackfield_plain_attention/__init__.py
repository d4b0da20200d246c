"""What this package plugs into Jackfield. Keep this module light: it is imported at every start."""

from __future__ import annotations

from typing import Any

from jackfield import hookimpl

jackfield_api = 3


@hookimpl
def register_attention_backends(registry: Any) -> None:
    # Below Jackfield's own: `auto` takes it only where nothing else serves.
    registry.add("plain", "jackfield_plain_attention.backend:PlainAttention", priority=-10)
