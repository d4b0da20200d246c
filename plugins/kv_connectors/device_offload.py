"""Device memory in a smaller format as a second tier under the prefix cache.

Blocks without a request are kept in fewer bits on the device, so that a hit needs neither a step
nor a transfer from the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from msgspec import Meta

from ...core.errors import OutOfMemory
from ...core.protocols.kv import KVConnectorSetup
from .cpu_offload import (
    CpuOffloadConnector,
    CpuOffloadOptions,
    CpuOffloadScheduler,
    CpuOffloadWorker,
)
from .reduced_blocks import ReducedType
from .threads import ThreadedWorker


class DeviceOffloadOptions(
    CpuOffloadOptions, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """`kv_connector_extra_config` of device_offload."""

    kv_offloading_size: Annotated[float, Meta(gt=0)] = 1.0
    """GiB of device memory, taken at start, besides what gpu_memory_utilization gives the cache."""
    kv_offloading_dtype: ReducedType = "int8"
    """Type in which blocks are kept."""


class DeviceOffloadConnector(CpuOffloadConnector):
    @classmethod
    def make_scheduler(cls, setup: KVConnectorSetup) -> DeviceOffloadScheduler:
        return DeviceOffloadScheduler(setup)

    @classmethod
    def make_worker(cls, setup: KVConnectorSetup) -> DeviceOffloadWorker:
        return DeviceOffloadWorker(setup)


class DeviceOffloadScheduler(CpuOffloadScheduler):
    options = DeviceOffloadOptions


class DeviceOffloadWorker(CpuOffloadWorker):
    options = DeviceOffloadOptions

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Allocate device memory. Raises OutOfMemory."""
        num_rows, row_bytes, _ = self._rows
        try:
            self._pool = torch.empty(
                num_rows, row_bytes, dtype=torch.uint8, device=kv_caches[0].device
            )
        except RuntimeError as error:
            size = num_rows * row_bytes / (1 << 30)
            raise OutOfMemory(
                f"kv_connector_extra_config.kv_offloading_size: {size:.1f} GiB of device memory "
                "are not to be had beside the cache: ask for less, or lower "
                f"gpu_memory_utilization ({error})",
                param="kv_transfer_config",
            ) from error
        ThreadedWorker.bind(self, kv_caches)
