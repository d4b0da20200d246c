"""Both halves of a KV connector without an engine between them, and caches for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...core.cache.groups import CachePart
from ...core.config import KVTransferConfig
from ...core.parts.kv_transfer import KVReport
from ...core.protocols.kv import KVCodec, KVConnectorSetup, KVLayout
from ...core.registry import Plugins
from ...core.request import Request
from ...core.sampling_params import SamplingParams

BLOCK = 4
SECONDS = 120.0
"""Longer than any operation here takes; what takes longer hangs."""


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that no event reports. Fails after `SECONDS`."""
    deadline = asyncio.get_running_loop().time() + SECONDS
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it never came about"
        await asyncio.sleep(0.001)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes, so that NaNs compare too."""
    return tensor.contiguous().view(torch.uint8)


def random_cache(blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a cache of keys and values [2, blocks, size, heads, dim], of any bit patterns."""
    shape = (2, blocks, size, heads, dim * dtype.itemsize)
    with torch.inference_mode():
        return torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)


def make_setup(
    name: str, extra: dict[str, Any], plugins: Plugins, caches: list[torch.Tensor]
) -> KVConnectorSetup:
    """Return the setup that an engine with these caches would pass to both halves."""
    layers = tuple(
        (CachePart("kv", tuple(cache.shape[3:]), str(cache.dtype)[6:], count=cache.shape[0]),)
        for cache in caches
    )
    layout = KVLayout(
        num_blocks=caches[0].shape[1],
        block_size=BLOCK,
        layers=layers,
        block_bytes=sum(cache[:, 0].nbytes for cache in caches),
        fingerprint=f"the kit's own {caches[0].dtype}".encode().ljust(32, b"."),
    )
    return KVConnectorSetup(
        transfer=KVTransferConfig(kv_connector=name, kv_connector_extra_config=extra),
        layout=layout,
        plugins=plugins,
        notify=lambda: None,
    )


class Halves:
    """Both halves of a connector without an engine between them."""

    def __init__(
        self, name: str, extra: dict[str, Any], plugins: Plugins, caches: list[torch.Tensor]
    ) -> None:
        setup = make_setup(name, extra, plugins, caches)
        connector = plugins["kv_connector"].load(name)
        self.scheduler = connector.make_scheduler(setup)
        self.worker = connector.make_worker(setup)
        self.worker.bind(caches)
        self._codec = KVCodec(connector)
        self._number = 0

    def _request(self, keys: Sequence[bytes]) -> Request:
        self._number += 1
        request = Request(
            request_id=f"request-{self._number}",
            prompt_token_ids=[5] * (len(keys) * BLOCK + 1),
            params=SamplingParams(),
            max_tokens=1,
            seed=0,
        )
        request.block_hashes = list(keys)
        return request

    async def found(self, keys: Sequence[bytes]) -> int:
        """Return the scheduler half's result, once it has one."""
        request = self._request(keys)
        count: int | None = None

        def answered() -> bool:
            nonlocal count
            count = self.scheduler.num_external_tokens(request, 0)
            return count is not None

        await until(answered)
        self.scheduler.request_finished(1_000_000 + self._number, request)
        assert count is not None
        return count // BLOCK * BLOCK

    async def save(self, keys: Sequence[bytes], block_ids: list[int]) -> None:
        """Save blocks, and wait for the end of the transfer."""
        request = self._request(keys)
        accepted = self.scheduler.start_save(self._number, request, keys, block_ids)
        assert list(accepted) == block_ids, "it saves none, or not all, of three blocks"
        assert self._number in (await self._ended()).finished

    async def load(self, keys: Sequence[bytes], block_ids: list[int]) -> tuple[int, ...]:
        """Load blocks, and return those that were not filled."""
        await self._ask_for(keys, block_ids)
        failed = (await self._ended()).failed
        if self._number not in failed:
            return ()
        return tuple(failed[self._number]) or tuple(block_ids)

    async def begin_load(self, keys: Sequence[bytes], block_ids: list[int]) -> None:
        """Start a load without waiting for its end."""
        await self._ask_for(keys, block_ids)
        self._send(self.scheduler.build_metadata())

    async def _ask_for(self, keys: Sequence[bytes], block_ids: list[int]) -> None:
        request = self._request(keys)
        promised = None
        while promised is None:
            promised = self.scheduler.num_external_tokens(request, 0)
            await asyncio.sleep(0.001)
        self.scheduler.start_load(self._number, request, keys, block_ids)

    def _send(self, metadata: Any) -> None:
        """Pass metadata to the worker half as encoded bytes."""
        sent = self._codec.encode_metadata(metadata)
        if sent is not None:
            self.worker.start(self._codec.decode_metadata(sent))

    async def _ended(self) -> KVReport:
        metadata = self.scheduler.build_metadata()
        assert metadata is not None, "nothing is sent to the worker half"
        assert self.scheduler.build_metadata() is None, "the same is sent twice"
        self._send(metadata)
        reports: list[KVReport] = []

        def told() -> bool:
            report = self.worker.poll()
            reports.extend([report] if report is not None else [])
            return any(self._number in (*r.finished, *r.failed) for r in reports)

        await until(told)
        for report in reports:
            self.scheduler.update(self._codec.decode_report(self._codec.encode_report(report)))
        return next(r for r in reports if self._number in (*r.finished, *r.failed))

    def close(self) -> None:
        """Close both halves in the order of an engine."""
        self.scheduler.close()
        self.worker.close()
