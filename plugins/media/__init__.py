"""Media models: how multimodal architectures take pictures."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl

MODELS = {
    "LlavaForConditionalGeneration": "llava:Llava",
}
"""Architecture → module and class."""


@hookimpl
def register_media_models(registry: Any) -> None:
    for architecture, reference in MODELS.items():
        registry.add(architecture, f"jackfield.plugins.media.{reference}")
