"""Scatter a step's keys and values into the paged cache.

Memory: reads and writes 2 * num_tokens * num_kv_heads * head_dim elements and num_tokens slots;
no arithmetic.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_kernel(
    key_ptr,
    value_ptr,
    cache_ptr,
    slot_ptr,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_kv,
    stride_block,
    stride_slot,
    stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program a token: all its heads, flattened to NUM_HEADS * HEAD_DIM elements."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    element = tl.arange(0, BLOCK_E)
    head, dim = element // HEAD_DIM, element % HEAD_DIM
    mask = element < NUM_HEADS * HEAD_DIM
    key = tl.load(key_ptr + token * stride_key_token + head * stride_key_head + dim, mask=mask)
    value = tl.load(
        value_ptr + token * stride_value_token + head * stride_value_head + dim, mask=mask
    )
    target = (
        cache_ptr
        + (slot // BLOCK_SIZE) * stride_block
        + (slot % BLOCK_SIZE) * stride_slot
        + head * stride_head
        + dim
    )
    tl.store(target, key.to(cache_ptr.dtype.element_ty), mask=mask)
    tl.store(target + stride_kv, value.to(cache_ptr.dtype.element_ty), mask=mask)


def kv_cache_write(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write key and value, [num_tokens, num_kv_heads, head_dim], at their slots.

    kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], changed in place, any strides
    but a last one of 1; so key and value, which may be views of a fused projection. slot_mapping:
    [num_tokens] int64, block * block_size + offset. Tokens that share a slot (padding, at the
    null block) leave any one of their values there.
    """
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    elements = triton.next_power_of_2(num_heads * head_dim)
    _write_kernel[(num_tokens,)](
        key,
        value,
        kv_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_cache.shape[2],
        BLOCK_E=elements,
        num_warps=4 if elements >= 1024 else 1,
    )
