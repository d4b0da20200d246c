"""The cache's layout and fingerprint, for KV connectors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b

import torch
from torch import nn

from ..config import EngineConfig
from ..loading.model_config import ModelConfig
from ..protocols.kv import KVLayout

SAMPLES = 64
"""Elements of each weight that the fingerprint looks at, spread over it."""
FORMAT = b"jackfield kv 1"
"""Increased if the meaning of a cached block changes."""


def kv_layout(
    config: EngineConfig,
    model_config: ModelConfig,
    model: nn.Module,
    kv_caches: Iterable[torch.Tensor],
) -> KVLayout:
    """`kv_caches`: one per layer, [2, num_blocks, block_size, num_kv_heads, head_dim]."""
    caches = list(kv_caches)
    dtype = str(caches[0].dtype).removeprefix("torch.")
    layers = tuple((cache.shape[3], cache.shape[4]) for cache in caches)
    hf_config = dict(model_config.hf_config.to_dict())
    for name in ("_name_or_path", "transformers_version"):
        hf_config.pop(name, None)
    facts = {
        "architecture": model_config.architecture,
        "config": hf_config,
        "weights": str(model_config.dtype),
        "quantization": config.quantization,
        "cache": dtype,
        "layers": layers,
        "block_size": config.block_size,
    }
    digest = blake2b(FORMAT, digest_size=32)
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    _hash_weights(model, digest)
    return KVLayout(
        num_blocks=caches[0].shape[1],
        block_size=config.block_size,
        dtype=dtype,
        layers=layers,
        block_bytes=sum(cache[:, 0].nbytes for cache in caches),
        fingerprint=digest.digest(),
    )


def _hash_weights(model: nn.Module, digest: blake2b) -> None:
    """Hash names, shapes and a sample of each tensor: this is cheap, and differs for a
    fine-tune."""
    samples: dict[torch.dtype, list[torch.Tensor]] = {}
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            step = -(-tensor.numel() // SAMPLES)
            samples.setdefault(tensor.dtype, []).append(tensor.reshape(-1)[::step])
    for dtype in sorted(samples, key=str):
        taken = torch.cat([s.contiguous().view(torch.uint8) for s in samples[dtype]])
        digest.update(taken.cpu().numpy().tobytes())
