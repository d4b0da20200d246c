"""The Triton backend with the kernels that any GPU has, to compare those for Hopper GPUs with."""

from __future__ import annotations

from typing import ClassVar

from .triton import TritonAttention


class PortableTritonAttention(TritonAttention):
    name: ClassVar[str] = "triton_portable"
    portable: ClassVar[bool] = True
