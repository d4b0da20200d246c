"""Rotary position embedding and its variants, from a table that is computed once: by the worker,
for as many positions as it serves, else when it is first read.

Variants: default, linear, dynamic, llama3, yarn, longrope, proportional (only the first pairs of a
head turn, each with the angle that it has in a whole one). Two of them change with the sequence's
length; a paged cache holds rotated keys, so here every sequence is treated as if it had the length
`max_model_len`. "dynamic" computes its base from it: within the original context that is the plain
rope. "longrope" uses the long factors if it exceeds the original context, also for short texts, and
otherwise the short ones.
Sources: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071); Llama 3.1's published scaling;
LongRoPE (arXiv 2402.13753).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ConfigError
from .context import BuildContext

if TYPE_CHECKING:
    from ..loading.model_config import ModelConfig


class Rotary(nn.Module):
    """Angles for the first `rotary_dim` channels of each head, halves paired (NeoX style).

    rope: in the form of a checkpoint's `rope_parameters`; None: those of the configuration.
    head_dim: channels of a head; None: the configuration's. Raises ConfigError.
    """

    def __init__(
        self,
        config: ModelConfig,
        build: BuildContext,
        rope: dict[str, Any] | None = None,
        *,
        head_dim: int | None = None,
    ) -> None:
        super().__init__()
        rope = config.rope_parameters if rope is None else rope
        partial = float(rope.get("partial_rotary_factor") or 1.0)
        if rope["rope_type"] == "proportional":
            partial = 1.0  # The channels that do not turn are in the table.
        size = head_dim or config.head_dim
        self.rotary_dim = int(size * partial)
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= size:
            field = "head_dim" if partial == 1.0 else "partial_rotary_factor"
            raise ConfigError(
                f"{field}: {self.rotary_dim} channels of a head (head_dim {size}) cannot be "
                "rotated in pairs",
                param=field,
            )
        self._frequencies, self._attention_factor = inverse_frequencies(
            rope, self.rotary_dim, config.max_model_len, config.hf_config.max_position_embeddings
        )
        self._max_model_len, self._device = config.max_model_len, build.device
        self.register_buffer("table", None, persistent=False)

    def fill(self, num_positions: int) -> None:
        """Make the table for that many positions. Recorded steps hold its address: called once,
        before the first step."""
        self.table = self.make_table(num_positions).to(self._device)

    def make_table(self, num_positions: int) -> torch.Tensor:
        """Return [num_positions, rotary_dim] float32 on the host: cosines, then sines."""
        angles = torch.outer(torch.arange(num_positions).float(), self._frequencies)
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * self._attention_factor

    @property
    def cos_sin(self) -> torch.Tensor:
        """[num_positions, rotary_dim] float32: cosines, then sines; max_model_len positions, unless
        `fill` was called for fewer."""
        if self.table is None:
            self.fill(self._max_model_len)
        table: torch.Tensor = self.table  # type: ignore[assignment]
        return table


def inverse_frequencies(
    rope: dict[str, Any], dim: int, max_model_len: int, max_positions: int
) -> tuple[torch.Tensor, float]:
    """→ ([dim / 2] float32, factor on cosines and sines). Raises ConfigError."""
    if isinstance(rope["rope_theta"], list):
        raise ConfigError("rope_theta: this model has one base for all layers", param="rope_theta")
    if rope["rope_theta"] is None:
        raise ConfigError("rope_theta: must be a number, got None", param="rope_theta")
    base = float(rope["rope_theta"])
    plain = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
    kind = rope["rope_type"]
    if kind == "default":
        return plain, 1.0
    factor = float(rope.get("factor") or 1.0)
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "proportional":
        turning = int(float(rope.get("partial_rotary_factor") or 1.0) * dim // 2)
        plain[turning:] = 0.0
        return plain / factor, 1.0
    if kind == "dynamic":
        original = rope.get("original_max_position_embeddings") or max_positions
        stretch = factor * max(max_model_len, original) / original - (factor - 1)
        base *= stretch ** (dim / (dim - 2))
        return 1.0 / base ** (torch.arange(0, dim, 2).float() / dim), 1.0
    if kind == "llama3":
        return _llama3(rope, plain, factor), 1.0
    if kind == "yarn":
        return _yarn(rope, plain, factor, base, dim, max_positions)
    if kind == "longrope":
        return _longrope(rope, plain, max_model_len, max_positions)
    raise ConfigError(f"rope_type: {kind!r} is not supported", param="rope_type")


def _llama3(rope: dict[str, Any], plain: torch.Tensor, factor: float) -> torch.Tensor:
    names = ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    for name in names:
        if rope.get(name) is None:
            raise ConfigError(f"{name}: a rope of type llama3 needs it", param=name)
    original, low, high = (float(rope[name]) for name in names)
    if not 0 < low < high:
        raise ConfigError(
            f"low_freq_factor: must be more than 0 and less than high_freq_factor {high:g}, "
            f"got {low:g}",
            param="low_freq_factor",
        )
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > original / low, plain / factor, plain)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, blended, scaled)


def _yarn(
    rope: dict[str, Any],
    plain: torch.Tensor,
    factor: float,
    base: float,
    dim: int,
    max_positions: int,
) -> tuple[torch.Tensor, float]:
    original = rope.get("original_max_position_embeddings") or max_positions
    if base <= 1:
        raise ConfigError(
            f"rope_theta: must be more than 1 for a rope that is scaled by yarn, got {base:g}",
            param="rope_theta",
        )

    def scale(by: float, mscale: float = 1.0) -> float:
        return 1.0 if by <= 1 else 0.1 * mscale * math.log(by) + 1.0

    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        if mscale and all_dim:
            attention_factor = scale(factor, mscale) / scale(factor, all_dim)
        else:
            attention_factor = scale(factor)

    def turns_to_dim(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = turns_to_dim(float(rope.get("beta_fast") or 32))
    high = turns_to_dim(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), float(attention_factor)


def _longrope(
    rope: dict[str, Any], plain: torch.Tensor, max_model_len: int, max_positions: int
) -> tuple[torch.Tensor, float]:
    original = rope.get("original_max_position_embeddings") or max_positions
    name = "long_factor" if max_model_len > original else "short_factor"
    factors = rope.get(name)
    if (
        not isinstance(factors, list)
        or len(factors) != len(plain)
        or not all(isinstance(factor, int | float) and factor for factor in factors)
    ):
        raise ConfigError(
            f"{name}: must be a list of {len(plain)} numbers but zero, one for each pair of "
            "channels",
            param=name,
        )
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        if original < 2:
            name = "original_max_position_embeddings"
            raise ConfigError(f"{name}: {original} is no context to stretch", param=name)
        stretch = rope.get("factor") or max_positions / original
        attention_factor = math.sqrt(1 + math.log(max(stretch, 1)) / math.log(original))
    return plain / torch.tensor(factors, dtype=torch.float32), float(attention_factor)
