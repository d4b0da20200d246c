"""torch's dense attention, for shapes that rarely repeat."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def without_plans() -> AbstractContextManager[None]:
    """Let torch's attention take any kernel but cuDNN's.

    On a Hopper GPU torch prefers cuDNN from 2.11 on, which builds a plan for each new shape: a few
    tenths of a second, kept for good.
    """
    return sdpa_kernel(WITHOUT_PLANS)


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by any kernel but cuDNN's.

    query: [..., heads, queries, head_dim]; key, value: [..., heads, keys, head_dim]; mask: true
    where seen, or added to the logits → query's shape.
    """
    with without_plans() if query.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
