"""Checkpoints of the head, for the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

SIZE, VOCAB = 192, 1536
"""Those of the embedded model."""


def write_head(folder: Path, *, follows: int | None = None) -> Path:
    """A head with random weights; or one that drafts `follows` tokens further in the vocabulary
    than the newest token, whatever the state."""
    draw = torch.Generator().manual_seed(1)
    shapes = {"embed_tokens": (VOCAB, SIZE), "proj": (SIZE, 2 * SIZE), "lm_head": (VOCAB, SIZE)}
    tensors = {
        f"{name}.weight": torch.randn(*shape, generator=draw) / SIZE**0.5
        for name, shape in shapes.items()
    }
    if follows is not None:
        # A token's own direction, strong enough that states do not count.
        embed = 1000 * tensors["embed_tokens.weight"].abs()
        tensors["proj.weight"] = torch.cat((torch.zeros(SIZE, SIZE), torch.eye(SIZE)), dim=1)
        tensors["embed_tokens.weight"] = embed
        centred = embed - embed.mean(dim=1, keepdim=True)
        tensors["lm_head.weight"] = torch.roll(
            centred / centred.norm(dim=1, keepdim=True), follows, 0
        )
    save_file(tensors, folder / "model.safetensors")
    config = {"architectures": ["ChainedHead"], "hidden_size": SIZE, "vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
