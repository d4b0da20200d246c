"""An attention backend that reads nothing but a plain cache of known lengths."""

from __future__ import annotations

from typing import Any, ClassVar

from jackfield.core.hooks import hookimpl
from jackfield.plugins.attention.torch import TorchAttention


class BareAttention(TorchAttention):
    """`torch` without what a backend may leave out."""

    name: ClassVar[str] = "bare"
    fp8_cache: ClassVar[bool] = False
    cache_formats: ClassVar[frozenset[str]] = frozenset()
    compacted_cache: ClassVar[bool] = False
    leveled_cache: ClassVar[bool] = False
    bounded_lengths: ClassVar[bool] = False


class Bare:
    """The plugin that registers it."""

    jackfield_api = 3

    @hookimpl
    def register_attention_backends(self, registry: Any) -> None:
        registry.add("bare", BareAttention, priority=-1)
