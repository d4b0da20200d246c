"""The cache's layout and fingerprint, for KV connectors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import torch
from torch import nn

from ...cache.groups import TokenCache
from ...config import EngineConfig
from ...loading.model_config import ModelConfig
from ...parallel.ranks import ONE_RANK, Ranks
from ...protocols.kv import KVLayout
from .memory import bytes_per_token

SAMPLES = 64
"""Elements per weight in the fingerprint."""
FORMAT = b"jackfield kv 1"
"""Increased when a cached block's meaning changes."""


def kv_layout(
    config: EngineConfig,
    model_config: ModelConfig,
    model: nn.Module,
    specs: Sequence[TokenCache],
    num_blocks: int,
    device: torch.device,
    ranks: Ranks = ONE_RANK,
) -> KVLayout:
    """Return the layout of caches `specs`, [num_layers]. A rank's cache fits the same rank of
    equally many only. All ranks call this; `device`: of their tensors.
    """
    layers = tuple(spec.parts for spec in specs)
    hf_config = dict(model_config.hf_config.to_dict())
    for name in ("_name_or_path", "transformers_version"):
        hf_config.pop(name, None)
    facts = {
        "architecture": model_config.architecture,
        "config": hf_config,
        "weights": str(model_config.dtype),
        "quantization": config.quantization,
        "layers": msgspec.to_builtins(layers),
        "block_size": config.block_size,
    }
    if config.batch_invariant:
        # Other engines' blocks differ in the last bits.
        facts["batch_invariant"] = device.type
    if ranks.tensor.size > 1:
        facts["rank"] = (ranks.tensor.rank, ranks.tensor.size)
    digest = blake2b(FORMAT, digest_size=32)
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    _hash_weights(model, digest)
    block_bytes = config.block_size * sum(bytes_per_token(spec) for spec in specs)
    all_ranks = ranks.pipeline.world or ranks.tensor
    total = all_ranks.all_gather(torch.tensor([block_bytes], device=device)).sum()
    return KVLayout(
        num_blocks=num_blocks,
        block_size=config.block_size,
        layers=layers,
        block_bytes=block_bytes,
        bytes_elsewhere=int(total) - block_bytes,
        fingerprint=digest.digest(),
    )


def model_fingerprint(model: nn.Module) -> bytes:
    """Return a digest [32] of all weights' names, shapes, dtypes and samples."""
    digest = blake2b(type(model).__name__.encode(), digest_size=32)
    _hash_weights(model, digest)
    return digest.digest()


def _hash_weights(model: nn.Module, digest: blake2b) -> None:
    """Hash names, shapes and samples, which is cheap and differs for a fine-tune."""
    samples: dict[torch.dtype, list[torch.Tensor]] = {}
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            step = -(-tensor.numel() // SAMPLES)
            samples.setdefault(tensor.dtype, []).append(tensor.reshape(-1)[::step])
    for dtype in sorted(samples, key=str):
        taken = torch.cat([s.contiguous().view(torch.uint8) for s in samples[dtype]])
        digest.update(taken.cpu().numpy().tobytes())
