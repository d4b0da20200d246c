"""Options of an engine: groups by subject, each extending the one before, as one struct can extend
only one other; the last is `EngineConfig`. Each option is documented once, where it is declared:
the command line and the reference page are derived from that.
"""

from __future__ import annotations

from .annotations import Device, KVCacheDType
from .engine_config import EngineConfig
from .kv_transfer_config import KVTransferConfig
from .profiler_config import ProfilerConfig
from .structured_outputs_config import StructuredOutputsConfig

__all__ = [
    "Device",
    "EngineConfig",
    "KVCacheDType",
    "KVTransferConfig",
    "ProfilerConfig",
    "StructuredOutputsConfig",
]
