"""What the benchmark plugs into the engine: outputs that ask questions, and a policy of chance."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from jackfield.core.hooks import hookimpl
from jackfield.core.protocols.attention import AttentionSpec
from jackfield.core.protocols.kv_compressors import KVCompressor
from jackfield.core.protocols.logits_processors import (
    LogitsProcessor,
    LogitsProcessorSetup,
    ProcessedRows,
)
from jackfield.core.step import SlotStart

from .tasks import KEYS, VALUES

FREE = -1
"""In place of a forced token: the model chooses a key or a value."""


class ForcedTokens(LogitsProcessor):
    """Dictates tokens of the output, so that a question can come after a compaction."""

    parameters: ClassVar[frozenset[str]] = frozenset({"forced_tokens"})
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"forced_tokens": [2, 17, FREE]},
        {"forced_tokens": [FREE, 80]},
    )
    stateless: ClassVar[bool] = True

    def __init__(self, setup: LogitsProcessorSetup) -> None:
        shape = (setup.num_slots, setup.max_model_len)
        self._forced = torch.full(shape, FREE, dtype=torch.int64, device=setup.device)
        self._free = torch.zeros(setup.vocab_size, dtype=torch.bool, device=setup.device)
        self._free[KEYS.start : VALUES.stop] = True

    def start(self, slot: int, request: SlotStart) -> bool:
        """Place the dictated tokens at their positions in the sequence."""
        forced = (request.params.extra_args or {}).get("forced_tokens")
        if forced is None:
            return False
        first = request.num_prompt_tokens
        row = torch.full_like(self._forced[slot], FREE)
        row[first : first + len(forced)] = torch.tensor(forced, dtype=torch.int64)
        self._forced[slot] = row
        return True

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        """logits: [num_rows, vocab_size]"""
        forced = self._forced[rows.device_slots, rows.lengths]
        tokens = torch.arange(logits.shape[1], device=logits.device)
        allowed = torch.where((forced == FREE)[:, None], self._free, tokens == forced[:, None])
        return logits.masked_fill(~allowed, -torch.inf)


class RandomCompressor(KVCompressor):
    """Keeps tokens by chance: what a policy must beat."""

    def scores(
        self,
        spec: AttentionSpec,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Drawn anew for each layer, by its keys."""
        seed = int(keys.float().abs().sum().item() * 1000) % 2**31
        draw = torch.Generator().manual_seed(seed)
        return torch.rand(keys.shape[:2], generator=draw).to(keys.device)


class Plugin:
    """Registers both."""

    jackfield_api = 3

    @hookimpl
    def register_logits_processors(self, registry: Any) -> None:
        registry.add("forced_tokens", f"{__name__}:ForcedTokens")

    @hookimpl
    def register_kv_compressors(self, registry: Any) -> None:
        registry.add("by_chance", f"{__name__}:RandomCompressor")
