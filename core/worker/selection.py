"""Whether an attention backend can serve a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..protocols.attention import AttentionBackend, AttentionSpec

if TYPE_CHECKING:
    import torch


def attention_refusal(
    backend: type[AttentionBackend], spec: AttentionSpec, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why `backend` cannot serve a layer here; None if it can."""
    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        return "it does not subclass jackfield.core.protocols.AttentionBackend"
    if unknown := spec.features - backend.features:
        return f"it has no {', '.join(sorted(unknown))}"
    return backend.supports(spec, device, dtype)
