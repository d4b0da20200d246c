"""One rank's weights as named tensors: its part of parameters, and of quantized layers' tensors
before repacking.

Names: a parameter's own (`model.layers.0.self_attn.qkv_proj.weight`: this rank's rows of all
shards); a tensor of a quantized layer has the layer's name, the shard's if there are several, and
the tensor's (`model.layers.0.self_attn.qkv_proj.q.qweight`); a scale of a cache has the name of the
module with the attention layer (`model.layers.0.self_attn.k_scale`).

States do not depend on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...errors import LoadError, listed
from ...nn.attention import Attention
from ...nn.quantized import LinearSpec, QuantizedLinear, TensorSpec
from ...parallel.missing_layer import missing_prefixes
from ...protocols.quantization import QuantizationMethod
from ..quantize import quantized_layers
from ..tensors.staging import Staging
from ..tensors.tied_heads import OwnHead

UNSCALED = (1.0, 1.0)


class UnprocessedLayer(QuantizedLinear):
    """Stands for a method's layer, and keeps its tensors."""

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__(layer.spec)
        self._layer = (layer,)  # In a tuple: it is no submodule.
        self.kept: Mapping[str, Mapping[str, torch.Tensor]] = {}
        """Shard name → suffix → tensor."""

    def tensors(self, out_features: int) -> Mapping[str, TensorSpec]:
        return self._layer[0].tensors(out_features)

    def ready(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> bool:
        """Return False: optional tensors may follow."""
        return False

    def process(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self.kept = {shard: dict(tensors) for shard, tensors in shards.items()}


class UnprocessedMethod:
    """A quantization method without repacking."""

    kv_cache_dtype: str | None = None

    def __init__(self, method: QuantizationMethod) -> None:
        self.name = method.name
        self.unit: int = getattr(method, "unit", 1)
        self._method = method

    def layer(self, spec: LinearSpec) -> UnprocessedLayer | None:
        """Return a layer that takes what the method's would."""
        layer = self._method.layer(spec)
        return None if layer is None else UnprocessedLayer(layer)


def rank_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a loaded model's weights, created with `UnprocessedMethod` if quantized."""
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for prefix, layer in quantized_layers(model).items():
        assert isinstance(layer, UnprocessedLayer), "processed tensors are not a checkpoint's"
        for shard, tensors in layer.kept.items():
            state |= {_key(prefix, shard, leaf): tensor for leaf, tensor in tensors.items()}
    for name, attention in _attention(model).items():
        if attention.cache_scales != UNSCALED:
            for leaf, scale in zip(("k_scale", "v_scale"), attention.cache_scales, strict=True):
                state[f"{name}.{leaf}"] = torch.tensor(scale, dtype=torch.float32)
    return state


class StateFiller:
    """Fills a rank's model from `rank_state`, tracking missing tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._elsewhere = missing_prefixes(model)
        self._parameters = dict(model.named_parameters())
        self._layers = [Staging(layer) for layer in quantized_layers(model).values()]
        self._places: dict[str, tuple[Staging, str, str]] = {
            _key(layer.module.spec.prefix, shard, leaf): (layer, shard, leaf)
            for layer in self._layers
            for shard, leaf in layer.places
        }
        self._attention = _attention(model)
        weight_map: Any = model.weight_map
        self._ignored: tuple[str, ...] = weight_map.ignored
        self._heads = tuple(f"{name.rpartition('.')[0]}." for name in weight_map.tied)
        self._own_heads: set[str] = set()
        """Tensors of tied heads: equal ones are not written."""
        self._missing = set(self._parameters)

    def takes(self, name: str) -> bool:
        """Return whether this stage uses a tensor."""
        return not name.startswith(self._elsewhere + self._ignored)

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor. Raises LoadError for an unknown one, or another shape."""
        if place := self._places.get(name):
            layer, shard, leaf = place
            layer.add(name, leaf, shard, tensor, divided=True)
            return
        parameter = self._parameters.get(name)
        if parameter is None and name.startswith(self._heads):
            self._own_heads.add(name)
            return
        if parameter is None:
            self._scale(name, tensor)
            return
        if parameter.shape != tensor.shape:
            raise LoadError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, this rank's is "
                f"{tuple(parameter.shape)}"
            )
        if not tensor.is_floating_point():
            raise LoadError(f"tensor {name!r} holds {tensor.dtype}, and is not quantized")
        parameter.data.copy_(tensor)
        self._missing.discard(name)

    def _scale(self, name: str, tensor: torch.Tensor) -> None:
        prefix, _, leaf = name.rpartition(".")
        layer = self._attention.get(prefix)
        if layer is None or leaf not in ("k_scale", "v_scale"):
            raise LoadError(f"unexpected tensor {name!r}: the model has no such parameter")
        if tensor.numel() != 1 or not 0.0 < float(tensor) < float("inf"):
            raise LoadError(f"{name}: a cache's scale must be one positive number")
        key, value = layer.cache_scales
        scale = float(tensor)
        layer.cache_scales = (scale, value) if leaf == "k_scale" else (key, scale)

    def finish(self) -> None:
        """Raise LoadError naming missing tensors, and OwnHead for an untied head."""
        if self._own_heads:
            raise OwnHead.of(self._own_heads)
        missing = sorted(self._missing)
        for layer in self._layers:
            missing += [_key(layer.module.spec.prefix, *place) for place in layer.missing]
        if missing:
            raise LoadError(f"missing tensors: {listed(missing)}")
        for layer in self._layers:
            layer.finish()


def _attention(model: nn.Module) -> dict[str, Attention]:
    """Return attention layers by their module's name."""
    return {
        name.rpartition(".")[0]: module
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    }


def _key(prefix: str, shard: str, leaf: str) -> str:
    return ".".join(filter(None, (prefix, shard, leaf)))
