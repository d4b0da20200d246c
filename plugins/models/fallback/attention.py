"""Stands in for attention in `transformers`' modules.

Its registry of attention functions is global, so only the name is registered. A call finds its
layer as an attribute of the calling module, and its step in the keyword argument `jackfield`, which
models pass down.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from ....core.errors import ConfigError
from ....core.nn.attention import Attention
from ....core.nn.context import BuildContext, ForwardContext
from ....core.protocols.attention import AttentionSpec

NAME = "jackfield"
"""Name of the attention implementation, of the keyword argument with the step, and of a layer's
attribute."""
WITHOUT_MEANING = frozenset({
    "dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict",
})  # fmt: skip
"""Keyword arguments of a call that do not change attention."""


class HeadsAttention(nn.Module):
    """A layer's attention for rotated heads: [1, heads, num_tokens, dim].

    The narrower of keys and values is padded with zeros.
    """

    def __init__(self, spec: AttentionSpec, value_dim: int, build: BuildContext) -> None:
        super().__init__()
        self.attention = Attention(spec, build)
        self.head_dim, self.value_dim = spec.head_dim, value_dim

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        """→ [1, num_tokens, num_heads, value_dim]. sinks: [num_heads]"""
        rows = self._rows
        sinks = None if sinks is None else sinks.flatten()
        out = self.attention.attend(rows(query), rows(key), rows(value), context, sinks=sinks)
        return out.view(1, len(out), -1, self.head_dim)[..., : self.value_dim].contiguous()

    def _rows(self, heads: torch.Tensor) -> torch.Tensor:
        """[1, heads, num_tokens, dim] → [num_tokens, heads, head_dim]"""
        rows = heads[0].transpose(0, 1)
        return F.pad(rows, (0, self.head_dim - rows.shape[-1])).contiguous()


class Probe:
    """Stands in for a step and records how each module calls attention. Tensors may be on
    "meta".
    """

    def __init__(self) -> None:
        self.calls: dict[nn.Module, tuple[AttentionSpec, int]] = {}
        """Calling module → its spec, and the width of its values."""

    def attend(
        self,
        module: nn.Module,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: object,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Record a call and return a result of its shape. Raises ConfigError for other than plain
        causal attention.
        """
        name = type(module).__name__
        if module in self.calls:
            raise refused(f"{name} attends more than once in a layer, or runs several times")
        if mask is not None:
            raise refused(f"{name} gives its attention a mask of its own")
        if not options.pop("is_causal", getattr(module, "is_causal", True)):
            raise refused(f"{name} is not causal: tokens attend to later ones")
        query, key, value = heads
        dim = query.shape[-1]
        scale, window = options.pop("scaling", None), options.pop("sliding_window", None)
        soft_cap, sinks = options.pop("softcap", None), options.pop("s_aux", None)
        others = {k for k, v in options.items() if v is not None} - WITHOUT_MEANING
        if others:
            raise refused(f"{name} passes {', '.join(sorted(others))} to its attention")
        spec = AttentionSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=max(dim, value.shape[-1]),
            scale=dim**-0.5 if scale is None else float(scale),
            sliding_window=None if window is None else int(window),
            soft_cap=None if soft_cap is None else float(soft_cap),
            sinks=sinks is not None,
        )
        self.calls[module] = spec, value.shape[-1]
        return _own_values(query, value)


class OwnValues:
    """Stands in for a step in which each token attends only to itself."""

    def attend(
        self,
        module: nn.Module,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: object,
        options: dict[str, Any],
    ) -> torch.Tensor:
        return _own_values(heads[0], heads[2])


def _own_values(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return (
        value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        .transpose(1, 2)
        .contiguous()
    )


def refused(reason: str) -> ConfigError:
    """Return the error for an unsupported model."""
    return ConfigError(f"model: it cannot run on transformers' modules: {reason}", param="model")


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention, by `transformers`' interface: heads [1, heads, num_tokens, dim]
    → [1, num_tokens, num_heads, value_dim].
    """
    step = options.pop(NAME, None)
    if isinstance(step, ForwardContext):
        layer: HeadsAttention = getattr(module, NAME)
        return layer(query, key, value, options.get("s_aux"), step), None
    if step is None:
        raise refused(f"{type(module).__name__} does not get the step that models pass down")
    return step.attend(module, (query, key, value), attention_mask, options), None


AttentionInterface.register(NAME, attend)
