"""Policies that use a request's last queries as estimates of later ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F

from ...core.nn.kv_cache.quantized_cache import KVCache
from ...core.protocols.attention import AttentionSpec
from ...core.protocols.kv_compressors import KVCompressor
from . import in_place
from .by_keys import RECENT, keep_ends, product

ROWS = 128
"""Rows of a similarity matrix per product."""
FRACTIONS = float(1 << 32)
"""Cosines are rounded to 1 / FRACTIONS before summation."""


def key_products(spec: AttentionSpec, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return the product of each query and each key.

    keys: [num_tokens, num_kv_heads, head_dim]; queries: [Q, num_heads, head_dim] → [num_kv_heads,
    group, Q, num_tokens] float32
    """
    grouped = queries.view(len(queries), spec.num_kv_heads, -1, spec.head_dim).permute(1, 2, 0, 3)
    products = product(grouped.flatten(1, 2), keys.permute(1, 2, 0))
    return products.view(*grouped.shape[:3], -1)


def attention_logits(
    spec: AttentionSpec, keys: torch.Tensor, queries: torch.Tensor
) -> torch.Tensor:
    """Return each query's logits for each key; shapes as of `key_products`."""
    logits = key_products(spec, keys, queries).mul_(spec.scale)
    if spec.soft_cap is not None:
        logits = spec.soft_cap * (logits / spec.soft_cap).tanh()
    return logits


def hide_later_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Mask the last queries' logits, [..., Q, num_tokens], of later tokens with -inf."""
    count = logits.shape[-2]
    last = logits[..., -count:]
    last.masked_fill_(~visible(count, last.shape[-1], logits.device), -torch.inf)
    return logits


def visible(num_queries: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return the keys that the last queries see, [num_queries, num_tokens] bool."""
    key = torch.arange(num_tokens, device=device)
    last = torch.arange(num_tokens - num_queries, num_tokens, device=device)
    return key <= last[:, None]


def newest_of_similar(keys: torch.Tensor, directions: torch.Tensor, similar: float) -> torch.Tensor:
    """Return the newest other key whose cosine with each key is over `similar`, [num_kv_heads,
    num_tokens] int64; -1: none. directions: [num_kv_heads, num_tokens, head_dim] float32, of the
    keys
    """
    if in_place.kernels_run(keys):
        return in_place.newest_similar(keys, similar).long()
    order = torch.arange(directions.shape[1], device=keys.device)
    newest = []
    for start in range(0, len(order), ROWS):
        rows = order[start : start + ROWS]
        cosines = directions[:, rows] @ directions.transpose(1, 2)
        cosines.masked_fill_(rows[:, None] == order, 0.0)
        newest.append(torch.where(cosines > similar, order, -1).amax(-1))
    return torch.cat(newest, dim=1)


def nearest(keys: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each key's cosine with the most similar of the others, and its index, [num_kv_heads,
    num_tokens] each. keys, others: [num_tokens, num_kv_heads, head_dim]
    """
    if in_place.kernels_run(keys):
        return in_place.most_similar(keys, others)
    directions, aims = (F.normalize(k.float(), dim=2).transpose(0, 1) for k in (keys, others))
    starts = range(0, directions.shape[1], ROWS)
    parts = [(directions[:, s : s + ROWS] @ aims.transpose(1, 2)).max(2) for s in starts]
    cosines, indices = zip(*parts, strict=True)
    return torch.cat(cosines, dim=1), torch.cat(indices, dim=1)


class SnapKV(KVCompressor):
    """Keep what the last queries attend to, and its neighbours, as SnapKV (arXiv 2404.14469) does:
    a question at the end of the prompt is answered well, a later one about something else not."""

    num_queries: ClassVar[int] = 16
    reads_values: ClassVar[bool] = False
    width: ClassVar[int] = 5
    """Neighbouring tokens whose scores are averaged."""

    def scores(
        self,
        spec: AttentionSpec,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The mean probability of a token over the queries that see it, pooled."""
        assert queries is not None, "num_queries is not 0"
        logits = hide_later_tokens(attention_logits(spec, keys, queries))
        weights = logits.softmax(-1).sum((1, 2)) / logits.shape[1]
        until_end = torch.arange(len(keys), 0, -1, device=keys.device)
        weights /= until_end.clamp_(max=len(queries))  # How many of the queries see a token.
        pooled = F.avg_pool1d(
            weights, self.width, stride=1, padding=self.width // 2, count_include_pad=False
        )
        scores = pooled.T.contiguous()
        scores[-RECENT:] = torch.inf
        return scores

    def cached_scores(
        self,
        spec: AttentionSpec,
        caches: Sequence[KVCache],
        blocks: torch.Tensor,
        num_tokens: int,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        assert queries is not None, "num_queries is not 0"
        tokens = in_place.tokens_for_queries(
            spec, caches, blocks, num_tokens, queries, self.num_queries
        )
        if tokens is None:
            return None
        scale = spec.scale * spec.key_scale
        weights = in_place.attention_weights(
            tokens, queries, scale, spec.soft_cap, self.num_queries
        )
        scores = F.avg_pool1d(
            weights.flatten(0, 1), self.width, stride=1, padding=self.width // 2,
            count_include_pad=False,
        ).view(weights.shape)  # fmt: skip
        scores[..., -RECENT:] = torch.inf
        return scores


class ExpectedAttention(KVCompressor):
    """Keep what queries like the last ones are expected to attend to, weighted by the size of its
    value (after Expected Attention, arXiv 2510.00636).

    The logits of future queries are taken as normally distributed with the mean and variance of
    those of the last queries, so the expectation of their exponentials is exp(mean + variance / 2).
    The paper takes the moments of all of the prompt's queries, without rotation.
    """

    num_queries: ClassVar[int] = 32

    def scores(
        self,
        spec: AttentionSpec,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The expected probability of a token times the norm of its value."""
        assert queries is not None, "num_queries is not 0"
        if spec.soft_cap is None:
            variance, mean = torch.var_mean(key_products(spec, keys, queries), 2, correction=0)
            expected = spec.scale * mean + spec.scale**2 / 2 * variance
        else:
            variance, mean = torch.var_mean(attention_logits(spec, keys, queries), 2, correction=0)
            expected = mean + variance / 2
        weights = expected.softmax(-1).mean(1).T
        norms = torch.linalg.vector_norm(values, dim=2, dtype=torch.float32)
        scores: torch.Tensor = weights * norms
        return keep_ends(scores.T).T

    def cached_scores(
        self,
        spec: AttentionSpec,
        caches: Sequence[KVCache],
        blocks: torch.Tensor,
        num_tokens: int,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        assert queries is not None, "num_queries is not 0"
        tokens = in_place.tokens_for_queries(
            spec, caches, blocks, num_tokens, queries, self.num_queries
        )
        if tokens is None:
            return None
        scale = spec.scale * spec.key_scale
        weights = in_place.expected_weights(tokens, queries, scale, spec.soft_cap, self.num_queries)
        return keep_ends(weights.mul_(spec.value_scale))


class RKV(KVCompressor):
    """Keep what the last queries attend to and no later token repeats, as R-KV (arXiv 2505.24133)
    does: made for long reasoning, with `kv_compression_interval`."""

    num_queries: ClassVar[int] = 8
    reads_values: ClassVar[bool] = False
    width: ClassVar[int] = 7
    """Neighbouring tokens over which importance is maximised."""
    importance: ClassVar[float] = 0.1
    """Weight of importance; that of redundancy is 1 - importance."""
    similar: ClassVar[float] = 0.5
    """Cosine from which keys count as repetitions."""

    def scores(
        self,
        spec: AttentionSpec,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Weighted importance - redundancy, both softmaxes over the tokens."""
        assert queries is not None, "num_queries is not 0"
        logits = hide_later_tokens(attention_logits(spec, keys, queries).amax(1))
        weights = logits.softmax(-1).mean(1)
        importance = F.max_pool1d(weights, self.width, stride=1, padding=self.width // 2)
        redundancy = self.repetition(keys).softmax(-1)
        scores = (self.importance * importance - (1 - self.importance) * redundancy).T.contiguous()
        return keep_ends(scores.T).T

    def newest_similar(self, keys: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        """As `newest_of_similar`."""
        return newest_of_similar(keys, directions, self.similar)

    def repetition(self, keys: torch.Tensor) -> torch.Tensor:
        """Return each key's mean cosine with all others, [num_kv_heads, num_tokens]; the newest of
        similar tokens is spared.
        """
        directions = F.normalize(keys.float(), dim=2).transpose(0, 1)
        newest = self.newest_similar(keys, directions)
        # The mean is that with the sum of all directions, less itself and less what is spared.
        total = (directions @ directions.sum(1)[:, :, None])[:, :, 0] - directions.square().sum(2)
        spared = newest.clamp(min=0)
        others = directions.gather(1, spared[:, :, None].expand(directions.shape))
        cosines = (directions * others).sum(2).masked_fill_(newest < 0, 0.0)
        # Whole numbers: on a GPU, sums of floats would differ from run to run.
        taken = torch.zeros_like(newest).scatter_add_(1, spared, (cosines * FRACTIONS).long())
        mean: torch.Tensor = (total - taken.float() / FRACTIONS) / directions.shape[1]
        return mean


class MergingSnapKV(SnapKV):
    """As SnapKV, but what is dropped leaves its value with the most similar token that stays."""

    reads_values: ClassVar[bool] = True
    similar: ClassVar[float] = 0.75
    """Cosine from which values are merged."""

    def nearest(
        self, keys: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each key's cosine with the most similar one that stays, and its place among them,
        [num_kv_heads, num_tokens] each.
        """
        return nearest(keys, keys.gather(0, chosen[:, :, None].expand(-1, -1, keys.shape[2])))

    def merged_values(
        self,
        spec: AttentionSpec,
        keys: torch.Tensor,
        values: torch.Tensor,
        chosen: torch.Tensor,
    ) -> torch.Tensor:
        """v <- (v + sum of w_i v_i) / (1 + sum of w_i), over the dropped tokens whose key is most
        similar to this one's: w_i = cosine * |v_i| / (|v_i| + |v|), 0 below `similar`."""
        own = values.float().transpose(0, 1)
        norms = own.norm(dim=2)
        index = chosen.T
        kept_norms = norms.gather(1, index)
        merged = own.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))
        weights = torch.ones_like(kept_norms)
        stays = torch.zeros_like(norms, dtype=torch.bool).scatter_(1, index, True)
        cosine, target = self.nearest(keys, chosen)
        share = cosine * norms / (norms + kept_norms.gather(1, target)).clamp(min=1e-12)
        share = share.masked_fill(stays | (cosine < self.similar), 0.0)
        weights.scatter_add_(1, target, share)
        taken = target[:, :, None].expand(own.shape)
        merged.scatter_add_(1, taken, share[:, :, None] * own)
        return (merged / weights[:, :, None]).transpose(0, 1).to(values.dtype)
