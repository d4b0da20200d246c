"""Operations of an indexer, which chooses the tokens that latent attention reads, in plain torch: a
part of `Operations`.

Source: DeepSeek-V3.2 (arXiv 2512.02556), DeepSeek Sparse Attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...protocols.latent_attention import ChosenTokens
from .operations import rotate_pairs

ELEMENTS = 1 << 25
"""Gathered keys or scores at once, which bounds the memory of a step."""


class IndexOperations:
    """T tokens, H heads of an indexer with D channels each, which share a key. The last channels
    are not rotated. Scores are float32."""

    def cached_index_keys(
        self,
        query: torch.Tensor | None,
        key: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        interleaved: bool,
    ) -> torch.Tensor | None:
        """Norm keys, rotate the first channels of keys and queries, and write keys to the cache.

        query: [T, H, D], None if no token is chosen in this step; key: [T, D]; both may be
        overwritten. weight, bias: [D], of a LayerNorm; positions: [T]; cos_sin: [max_positions,
        rope_dim] float32, cosines then sines; cache: [num_blocks, block_size, D]; slot_mapping: [T]
        int64. `interleaved`: as `cached_latents` has it → rotated queries, or None
        """
        rotation = cos_sin[positions]
        key = F.layer_norm(key, weight.shape, weight, bias, eps)
        key = _rotate_first(key, rotation, interleaved)
        cache.flatten(0, 1).index_copy_(0, slot_mapping, key.to(cache.dtype))
        return None if query is None else _rotate_first(query, rotation[:, None], interleaved)

    def choose_cached_tokens(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        query_start: torch.Tensor,
        positions: torch.Tensor,
        *,
        topk: int,
        max_seq_len: int,
    ) -> ChosenTokens:
        """Choose the `topk` cached tokens with the highest scores, of those up to each query's own;
        among equal scores, the earlier ones; all, where there are no more.

        The score of a token with key k is Σ weights[h] * max(query[h] · k, 0) over the heads h.

        query: [T, H, D]; weights: [T, H] float32; cache: [num_blocks, block_size, D], this step's
        keys included; block_table: [R, columns] int32; query_start: [R + 1] int32: row r's tokens
        are query_start[r] .. query_start[r + 1], and tokens after all rows' are padding; positions:
        [T] int64; max_seq_len: an upper bound of the rows' lengths. No device value is read on the
        host.
        """
        size, num_rows = cache.shape[1], block_table.shape[0]
        place = torch.arange(max_seq_len, device=query.device)
        tokens = torch.arange(len(query), device=query.device, dtype=query_start.dtype)
        rows = torch.searchsorted(query_start, tokens, right=True).sub_(1).clamp_(max=num_rows - 1)
        slots, kept = [], min(topk, max_seq_len)
        most = max(1, ELEMENTS // (max_seq_len * max(query.shape[1:])))
        for begin in range(0, len(query), most):
            part = slice(begin, begin + most)
            table = block_table[rows[part], : -(-max_seq_len // size)].long()
            keys = cache[table].flatten(1, 2)[:, :max_seq_len].float()
            products = torch.einsum("thd,tsd->ths", query[part].float(), keys)
            scores = torch.einsum("th,ths->ts", weights[part], F.relu(products))
            scores.masked_fill_(place > positions[part, None], -torch.inf)
            order = scores.argsort(dim=1, descending=True, stable=True)[:, :kept].sort(dim=1).values
            own = table.gather(1, order // size) * size + order % size
            own.masked_fill_(order > positions[part, None], 0)
            slots.append(F.pad(own, (0, topk - kept)).to(torch.int32))
        counts = (positions + 1).clamp(max=topk).to(torch.int32)
        return ChosenTokens(torch.cat(slots), counts)


def _rotate_first(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first rope_dim channels. x: [..., D]; cos_sin: [..., rope_dim]"""
    rope_dim = cos_sin.shape[-1]
    turned = rotate_pairs(x[..., :rope_dim], cos_sin, interleaved)
    return torch.cat([turned, x[..., rope_dim:]], dim=-1)
