"""Limits on finishable requests, for admission and scheduler."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..cache.groups import ONE_GROUP, CacheGroup, longest_sequence, sequence_blocks


@dataclass(frozen=True)
class RequestLimits:
    max_model_len: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    num_blocks: int | None
    """Usable KV blocks; None: no cache."""
    block_size: int
    groups: tuple[CacheGroup, ...] = ONE_GROUP
    """Groups of layers, each with a block table."""
    max_chunk: int = 1 << 30
    """Most tokens of a request per step."""

    def longest_sequence(self) -> int:
        if self.num_blocks is None:
            return self.max_model_len
        cached = longest_sequence(
            self.groups, self.num_blocks, self.block_size, self.max_chunk, self.max_model_len
        )
        # The last token is sampled but never computed: it needs no KV.
        return min(self.max_model_len, cached + 1)

    def beside_source(self, num_tokens: int) -> RequestLimits:
        """Return the limits of a request with a source in blocks."""
        if self.num_blocks is None:
            return self
        return replace(self, num_blocks=self.num_blocks - -(-num_tokens // self.block_size))

    def rejection_reason(self, num_prompt_tokens: int, max_total_tokens: int) -> str | None:
        """Return why such a request could never finish, or None.

        max_total_tokens: of prompt and output.
        """
        if not 0 < num_prompt_tokens < self.max_model_len:
            return (
                f"the prompt has {num_prompt_tokens} tokens; it needs 1 to "
                f"{self.max_model_len - 1} (max_model_len {self.max_model_len})"
            )
        if max_total_tokens > self.max_model_len:
            return (
                f"prompt and max_tokens are {max_total_tokens} tokens; at most "
                f"{self.max_model_len} fit (max_model_len)"
            )
        if not self.enable_chunked_prefill and num_prompt_tokens > self.max_num_batched_tokens:
            return (
                f"the prompt has {num_prompt_tokens} tokens, but without chunked prefill a step "
                f"takes {self.max_num_batched_tokens} (max_num_batched_tokens)"
            )
        if self.num_blocks is None:
            return None
        # The last token needs no KV, see above.
        needed = sequence_blocks(self.groups, max_total_tokens - 1, self.block_size, self.max_chunk)
        if needed > self.num_blocks:
            return (
                f"prompt and max_tokens need {needed} KV-cache blocks; there are "
                f"{self.num_blocks} of {self.block_size} tokens"
            )
        return None
