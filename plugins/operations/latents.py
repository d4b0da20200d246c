"""Operations on latents by Triton kernels."""

from __future__ import annotations

import torch

from ...core.nn.latent.operations import LatentOperations, LatentTokens
from ...kernels.attention.latent.latent_inputs import latent_inputs


class TritonLatents(LatentOperations):
    def cached_latents(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        interleaved: bool,
    ) -> LatentTokens:
        latent_inputs(
            query, latent, weight, eps, positions, cos_sin, cache, slot_mapping,
            interleaved=interleaved,
        )  # fmt: skip
        return LatentTokens(query, latent)
