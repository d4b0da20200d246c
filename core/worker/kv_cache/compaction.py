"""Compaction: chooses the tokens of a slot that stay, and moves their keys and values."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ...config import EngineConfig
from ...errors import ConfigError
from ...nn.attention import Attention
from ...protocols.kv_compressors import KVCompressor
from ...registry import Plugins
from ...step import Compaction
from ..slot_table import SlotTable

logger = logging.getLogger("jackfield.worker")


class Compactor:
    """Carries out the compactions of plans, before the rows of the same plan. Nothing waits for the
    device."""

    def __init__(
        self,
        compressor: KVCompressor,
        described: str,
        layers: Sequence[Attention],
        table: SlotTable,
        block_size: int,
    ) -> None:
        """described: what errors call the compressor. layers: all of the model's, with their caches
        bound."""
        self._compressor = compressor
        self._described = described
        self._layers = tuple(layers)
        self._table = table
        self._block_size = block_size

    def run(self, compactions: Sequence[Compaction]) -> dict[int, str]:
        """Move caches to their new blocks, one after another; `table` still has the old ones.

        Return the slots whose compaction failed, with the reason: their new blocks hold nothing of
        use, and their requests must end.
        """
        failures = {}
        for compaction in compactions:
            try:
                self._run_one(compaction)
            except (Exception, SystemExit) as error:
                logger.error("%s failed", self._described, exc_info=error)
                reason = f"{self._described} failed: {type(error).__name__}: {error}"
                failures[compaction.slot] = reason
        return failures

    def _run_one(self, compaction: Compaction) -> None:
        device, size = self._table.storage.device, self._block_size
        num_columns = -(-compaction.num_tokens // size)
        old = self._table.block_table[compaction.slot, :num_columns]
        new = torch.tensor(
            compaction.block_ids, dtype=torch.int32, pin_memory=device.type == "cuda"
        ).to(device, non_blocking=True)
        sources = self._places(old, compaction.num_tokens)
        targets = self._places(new, compaction.kept)
        for layer in self._layers:
            assert layer.kv_cache is not None, "the worker binds the cache before the first step"
            cache = layer.kv_cache.flatten(1, 2)
            keys, values = cache[:, sources]
            scores = self._compressor.scores(layer.spec, keys, values)
            if scores.shape != keys.shape[:2]:
                raise ValueError(
                    f"its scores are {list(scores.shape)}, not [num_tokens, num_kv_heads], which "
                    f"is {list(keys.shape[:2])}"
                )
            chosen = best(scores, compaction.kept)[:, :, None].expand(-1, -1, keys.shape[2])
            cache[0].index_copy_(0, targets, keys.gather(0, chosen))
            cache[1].index_copy_(0, targets, values.gather(0, chosen))

    def _places(self, block_ids: torch.Tensor, count: int) -> torch.Tensor:
        """Return where the first `count` tokens of a table are in a cache, [count] int64."""
        offsets = torch.arange(self._block_size, device=block_ids.device)
        return (block_ids.long()[:, None] * self._block_size + offsets).flatten()[:count]


def best(scores: torch.Tensor, kept: int) -> torch.Tensor:
    """Return the tokens with the highest scores of each head, the earlier among equals.

    scores: [num_tokens, num_kv_heads] → [kept, num_kv_heads] int64, ascending
    """
    order = scores.argsort(dim=0, descending=True, stable=True)
    return order[:kept].sort(dim=0).values


def load_compressor(
    plugins: Plugins, config: EngineConfig, layers: Sequence[Attention], cache_dtype: torch.dtype
) -> KVCompressor | None:
    """Return the compressor that the configuration names; None: it names none.

    Raises ConfigError if a layer's cache cannot be compacted, or not by this one.
    """
    name = config.kv_compression
    if name is None:
        return None
    registry = plugins["kv_compressor"]
    compressor_class = registry.load(name)
    for layer in layers:
        reason = _refusal(layer, cache_dtype)
        if reason is None:
            with registry.calling(name, "refusal"):
                reason = compressor_class.refusal(layer.spec)
        if reason is not None:
            raise ConfigError(
                f"kv_compression: {name!r} cannot serve this model here: {reason}",
                param="kv_compression",
            )
    with registry.calling(name, "its constructor"):
        compressor: KVCompressor = compressor_class()
    return compressor


def _refusal(layer: Attention, cache_dtype: torch.dtype) -> str | None:
    """Return why a layer's cache cannot be compacted; None if it can."""
    if cache_dtype.itemsize == 1:
        return "an fp8 cache is not compacted (kv_cache_dtype)"
    if layer.spec.sliding_window is not None:
        return "a layer has a sliding window, which counts the tokens in the cache"
    if layer.spec.alibi_slopes is not None:
        return "a layer has ALiBi slopes, which count the tokens in the cache"
    parts = [(part.name, part.count) for part in layer.cache_spec(cache_dtype).parts]
    if parts != [("kv", 2)]:
        return "a layer caches other things than keys and values"
    return None
