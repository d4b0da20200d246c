"""Jackfield: an LLM serving engine built as an asyncio plugin framework.

from jackfield import AsyncEngine, EngineConfig, SamplingParams
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .core.config import EngineConfig
from .core.hooks import hookimpl
from .core.lora_request import LoRARequest
from .core.outputs import PoolingRequestOutput, RequestOutput
from .core.pooling_params import PoolingParams
from .core.sampling_params import OutputKind, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from .core.engine.async_engine import AsyncEngine
    from .entrypoints.beam_search import BeamSearchParams
    from .entrypoints.offline import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "EngineConfig",
    "LoRARequest",
    "OutputKind",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "hookimpl",
]

_LAZY = {
    "AsyncEngine": "core.engine.async_engine",
    "BeamSearchParams": "entrypoints.beam_search",
    "LLM": "entrypoints.offline",
}


def __getattr__(name: str) -> Any:
    """Import the heavy faces only when they are used."""
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
