"""Weight maps: which checkpoint tensors go into which parameters, as data.

    weight_map = WeightMap(
        stacked={
            "q_proj": Shard("qkv_proj", "q"),
            "k_proj": Shard("qkv_proj", "k"),
            "v_proj": Shard("qkv_proj", "v"),
        },
    )

A checkpoint name maps to the parameter of the same name, unless one of its dotted parts is in
`stacked`: then it fills that shard of the merged parameter. Before that `prefixes`, `parts` and
`names` give the name the shape that the model's own names have. A number behind the part `experts`
is an expert's: all experts' tensors are shards of one parameter ("experts.3.gate_proj" is the shard
"3.gate" of "experts.gate_up_proj"). Where a checkpoint has one tensor for all experts, `together`
says how it comes apart into the same shards. Where its rows stand in another order than here,
`rows` says in which.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ..errors import LoadError, listed
from ..nn.attention import Attention
from ..nn.experts import ExpertLinear
from ..nn.quantized import QuantizedLinear
from ..old_names import module_getattr
from ..parallel.expert_share import ExpertShare
from ..parallel.missing_layer import missing_prefixes
from ..parallel.sharding import Sharding
from .tensors.forms import RowOrder, Shard, StackedExperts
from .tensors.staging import Staging
from .tensors.tied_heads import TiedHeads
from .text_part import inner_name

IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
MEDIA = "media."
"""Prefix of the parameters of a model's encoder of media."""
EXPERTS = "experts"
"""Dotted part before experts' numbers."""
CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale")
"""Checkpoint names of fp8 cache scales."""


@dataclass(frozen=True)
class WeightMap:
    """The mapping from checkpoint names to parameters."""

    stacked: Mapping[str, Shard] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    """Parameter → the one it shares memory with when the model ties them."""
    prefixes: Mapping[str, str] = field(default_factory=dict)
    """Start of a checkpoint name → what stands there instead; the first that fits."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Dotted parts anywhere in a checkpoint name → theirs here; one after the other."""
    names: Mapping[str, str] = field(default_factory=dict)
    """One part of a name here, or two → what checkpoints call it, where that is one to one."""
    together: Mapping[str, StackedExperts] = field(default_factory=dict)
    """Last part of a checkpoint name below `experts` → how that tensor comes apart."""
    rows: Mapping[str, RowOrder] = field(default_factory=dict)
    """Dotted part of a checkpoint name, as `renamed` gives it → how the rows of its tensors are put
    in order."""
    zeros: tuple[str, ...] = ()
    """Parameters that are zeros if a checkpoint does not have them."""
    optional: tuple[str, ...] = ()
    """Parameters that stay as they are if a checkpoint does not have them; the module finds these
    in its attribute `absent`."""
    ignored: tuple[str, ...] = ()
    """Starts of names (after `prefixes`) that may be left over where the model has no place."""
    only: tuple[str, ...] = ()
    """Starts of the checkpoint names that are the model's, where others are another model's; empty:
    all are."""
    text_part: bool = False
    """Whether checkpoints have other parts besides the model (`text_part`)."""
    media: WeightMap | None = None
    """Of the model's encoder of media, which is a part of its own."""

    def own(self, name: str) -> str | None:
        """Return a checkpoint name as the other methods take it; None if it is of another part."""
        if self.media is not None and (own := self.media.own(name)) is not None:
            return MEDIA + own
        inner = inner_name(name) if self.text_part else name
        if not self.only:
            return inner
        return next((each for each in (name, inner) if (each or "").startswith(self.only)), None)

    def renamed(self, name: str) -> str:
        """Return a checkpoint name in the model's terms, shards still separate."""
        if name.startswith(MEDIA):
            return name
        for old, new in self.prefixes.items():
            if name.startswith(old):
                name = new + name[len(old) :]
                break
        name = f".{name}."
        for old, new in self.parts.items():
            name = name.replace(f".{old}.", f".{new}.")
        for new, old in self.names.items():
            name = name.replace(f".{old}.", f".{new}.")
        return name[1:-1]

    def together_at(self, name: str) -> tuple[str, StackedExperts] | None:
        """Return the parameter that a checkpoint's tensor of all experts fills, and how; None: it
        is not one."""
        prefix, _, last = self.renamed(name).rpartition(".")
        together = self.together.get(last) if f".{prefix}".endswith(f".{EXPERTS}") else None
        return None if together is None else (f"{prefix}.{together.parameter}", together)

    def pieces(
        self, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, str | None, torch.Tensor]]:
        """Split a checkpoint tensor: (parameter name, shard name or None, tensor).

        Raises LoadError where it should hold all experts and cannot.
        """
        if name.startswith(MEDIA):
            yield name, None, tensor
            return
        renamed = self.renamed(name)
        for dotted in renamed.split(".") if self.rows else ():
            if dotted in self.rows:
                tensor = self.rows[dotted].apply(name, tensor)
        if (at := self.together_at(name)) is None:
            yield *self.target(name), tensor
            return
        parameter, together = at
        try:
            for shard, part in together.shards(tensor):
                yield parameter, shard, part
        except LoadError as error:
            raise LoadError(f"tensor {name!r} {error.message}") from error

    def is_transposed(self, name: str) -> bool:
        """Return whether `pieces` turns this tensor's columns into rows."""
        return False

    def target(self, name: str) -> tuple[str, str | None]:
        """Return (parameter name, shard name or None) for a checkpoint name."""
        if name.startswith(MEDIA):
            return name, None
        parts = self.renamed(name).split(".")
        shard: list[str] = []
        for index, (part, after) in enumerate(itertools.pairwise(parts)):
            if part == EXPERTS and after.isdecimal():
                shard.append(parts.pop(index + 1))
                break
        for index, part in enumerate(parts):
            if part in self.stacked:
                target = self.stacked[part]
                parts[index] = target.parameter
                shard += [target.name] * bool(target.name)
                break
        return ".".join(parts), ".".join(shard) or None

    def source(self, parameter: str, shard: str | None = None) -> str:
        """Return the checkpoint name of (parameter, shard), without `prefixes` and `parts`.

        A layer's name does for a parameter's: what its tensors' names begin with.
        """
        if parameter.startswith(MEDIA):
            return parameter
        for last, together in self.together.items():
            prefix, _, rest = parameter.partition(f".{EXPERTS}.")
            if rest in (together.parameter, together.parameter.partition(".")[0]):
                return self._stored([*prefix.split("."), EXPERTS, last])
        parts = parameter.split(".")
        expert, _, inner = (shard or "").partition(".") if EXPERTS in parts else ("", "", shard)
        if expert:
            parts.insert(parts.index(EXPERTS) + 1, expert)
        for part, target in self.stacked.items():
            if target.name == inner and target.parameter in parts:
                parts[parts.index(target.parameter)] = part
                inner = None
                break
        if inner:
            return f"{parameter} (shard {shard})"
        return self._stored(parts)

    def _stored(self, parts: list[str]) -> str:
        """Return a name's parts as in checkpoints."""
        stored = []
        while parts:
            count = 2 if ".".join(parts[:2]) in self.names else 1
            name, parts = ".".join(parts[:count]), parts[count:]
            stored.append(self.names.get(name, name))
        return ".".join(stored)


class TensorFile(Protocol):
    """A file of named tensors, like `safetensors.safe_open`'s."""

    def get_tensor(self, name: str, /) -> torch.Tensor:
        """Read a tensor."""

    def get_slice(self, name: str, /) -> Any:
        """Return a lazily read tensor, with `get_shape`."""


class ParameterFiller:
    """Copies named tensors into a model's parameters, and tracks which are missing."""

    def __init__(self, model: nn.Module, weight_map: WeightMap) -> None:
        self.model = model
        self.weight_map = weight_map
        self._elsewhere = missing_prefixes(model)
        self.parameters = dict(model.named_parameters())
        modules = dict(model.named_modules())
        self.attention = {
            name.rpartition(".")[0]: module
            for name, module in modules.items()
            if isinstance(module, Attention)
        }
        """Attention layers by the name of the module that they are part of."""
        self.quantized = {
            module.spec.prefix: Staging(module)
            for module in modules.values()
            if isinstance(module, QuantizedLinear)
        }
        self.tied = TiedHeads(weight_map.tied, self.parameters, self.quantized)
        self.expert_shares = {
            name: module.expert_share
            for name, module in modules.items()
            if isinstance(module, ExpertLinear | QuantizedLinear) and module.expert_share
        }
        """Layers of which this rank holds some experts."""
        self.shards: dict[str, Mapping[str, slice]] = {}
        self.shardings: dict[str, Sharding] = {}
        """Parameters of which this rank holds a part."""
        self.missing: set[tuple[str, str | None]] = set()
        for name in self.parameters:
            prefix, _, leaf = name.rpartition(".")
            shards = getattr(modules[prefix], "shards", None)
            if sharding := getattr(modules[prefix], "shardings", {}).get(leaf):
                self.shardings[name] = sharding
            if shards:
                self.shards[name] = shards
                self.missing |= {(name, shard) for shard in shards}
            else:
                self.missing.add((name, None))

    def takes(self, name: str) -> bool:
        """Return whether `fill` needs a checkpoint's tensor; False: it is not of use, or another
        rank has it."""
        own = self.weight_map.own(name)
        if own is None or name.endswith(IGNORED_SUFFIXES):
            return False
        if not self._elsewhere and not self.expert_shares:
            return True
        parameter_name, shard = self.weight_map.target(own)
        if parameter_name.startswith(self._elsewhere):
            return False
        if shard is None or self.weight_map.together_at(own) is not None:
            return True
        share = self._expert_share(parameter_name)
        return share is None or not share.is_elsewhere(shard)

    @property
    def takes_all(self) -> bool:
        """Whether the model has a place for every tensor of the checkpoint."""
        return not (self._elsewhere or self.weight_map.text_part or self.weight_map.only)

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one checkpoint tensor, as far as this rank holds it. Raises LoadError if it has no
        parameter or another shape."""
        own = self.weight_map.own(name)
        if own is None or not self.takes(name):
            return
        for parameter_name, shard, part in self.weight_map.pieces(own, tensor):
            share = self._expert_share(parameter_name) if shard is not None else None
            if share is None or not share.is_elsewhere(shard or ""):
                self._fill(name, parameter_name, shard, part)

    def fill_from(self, file: TensorFile, name: str) -> None:
        """Copy one checkpoint tensor; what other ranks hold is not read, but for parts of products.
        Raises LoadError as `fill`."""
        own = self.weight_map.own(name)
        if own is None or not self.takes(name):
            return
        at = self.weight_map.together_at(own) if self.expert_shares else None
        share = None if at is None else self._expert_share(at[0])
        if at is None or share is None:
            self.fill(name, file.get_tensor(name))
            return
        (parameter, together), stored = at, file.get_slice(name)
        shape = stored.get_shape()
        if len(shape) < together.least_dims or shape[0] != share.num_experts:
            self.fill(name, stored[:])  # Which refuses it, with the reason.
            return
        for expert in share.own:
            for shard, part in together.shards(stored[expert : expert + 1], expert):
                self._fill(name, parameter, shard, part)

    def _expert_share(self, parameter_name: str) -> ExpertShare | None:
        """Return the share of a parameter's or quantized tensor's layer."""
        prefix = parameter_name.rpartition(".")[0] if self.expert_shares else ""
        while prefix and prefix not in self.expert_shares:
            prefix = prefix.rpartition(".")[0]
        return self.expert_shares.get(prefix)

    def _fill(
        self, name: str, parameter_name: str, shard: str | None, tensor: torch.Tensor
    ) -> None:
        if name.endswith(CACHE_SCALES) and self._scale_cache(parameter_name, tensor):
            return
        if self._stage(name, parameter_name, shard, tensor):
            return
        if (embedding := self.tied.embedding(parameter_name)) is not None:
            own = tensor
            with contextlib.suppress(LoadError):  # A tensor of another form is the head's own.
                own = self._own_part(embedding, None, name, tensor)
            self.tied.add_head(name, parameter_name, tensor, own)
            return
        parameter = self.parameters.get(parameter_name)
        if parameter is None:
            if parameter_name.startswith(self.weight_map.ignored):
                return
            raise LoadError(f"unexpected tensor {name!r}: the model has no such parameter")
        into = parameter.data
        if shard is not None:
            part = self.shards.get(parameter_name, {}).get(shard)
            if part is None:
                raise LoadError(f"unexpected tensor {name!r}: {parameter_name} has no such part")
            into = into[part]
        whole, tensor = tensor, self._own_part(parameter_name, shard, name, tensor)
        if into.shape != tensor.shape:
            raise LoadError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, the model's is "
                f"{tuple(into.shape)}"
            )
        if tensor.is_floating_point() != into.is_floating_point():
            raise LoadError(f"tensor {name!r} holds {tensor.dtype}, and the model is not quantized")
        self.tied.add_embedding(parameter_name, whole, tensor)
        into.copy_(tensor)
        self.missing.discard((parameter_name, shard))

    def _own_part(
        self, parameter_name: str, shard: str | None, name: str, tensor: torch.Tensor
    ) -> torch.Tensor:
        if (sharding := self.shardings.get(parameter_name)) is None:
            return tensor
        try:
            return sharding.part(shard, tensor)
        except LoadError as error:
            raise LoadError(f"tensor {name!r} {error.message}") from error

    def _scale_cache(self, target: str, tensor: torch.Tensor) -> bool:
        """Set an attention layer's cache scale; False without the layer.

        Raises LoadError unless positive.
        """
        prefix, _, leaf = target.rpartition(".")
        while prefix and prefix not in self.attention:
            prefix = prefix.rpartition(".")[0]
        if not prefix:
            return False
        if leaf in ("q_scale", "prob_scale"):  # For products that are not done in fp8 here.
            return True
        if tensor.numel() != 1 or not 0.0 < float(tensor) < float("inf"):
            raise LoadError(f"{target}: a cache's scale must be one positive number")
        layer, scale = self.attention[prefix], float(tensor)
        key, value = layer.cache_scales
        key = scale if leaf != "v_scale" else key
        value = scale if leaf != "k_scale" else value
        layer.cache_scales = (key, value)
        return True

    def _stage(self, name: str, target: str, shard: str | None, tensor: torch.Tensor) -> bool:
        """Pass a tensor to its quantized layer; False without one."""
        prefix, _, leaf = target.rpartition(".")
        if leaf == "bias":
            layer = self.quantized.get(prefix)
            # Some tools write biases of zeros for layers that have none.
            return layer is not None and layer.module.bias is None and not tensor.any()
        while prefix:
            if (layer := self.quantized.get(prefix)) is not None:
                layer.add(name, leaf, shard, tensor)
                self.tied.add_quantized(prefix, leaf, tensor)
                return True
            prefix, _, part = prefix.rpartition(".")
            leaf = f"{part}.{leaf}"
        return False

    def wanted(self) -> list[str]:
        """Return the names, in the checkpoint's terms, of tensors that are missing."""
        missing = sorted(self.missing, key=str)
        for prefix, layer in self.quantized.items():
            missing += [(f"{prefix}.{leaf}", shard or None) for shard, leaf in layer.missing]
        return list(dict.fromkeys(self.weight_map.source(*parameter) for parameter in missing))

    def heads(self) -> list[str]:
        """Return the names, in the checkpoint's terms, of heads that the model ties to its
        embeddings: a checkpoint may have them."""
        return [self.weight_map.source(name) for name in self.tied.names]

    def finish(self) -> None:
        """Raise LoadError with the names of tensors that the checkpoint does not have, and OwnHead
        where it has a head that differs from the embeddings in its place."""
        self.tied.finish()
        self.missing -= {(name, None) for name in self.tied.filled}
        for name in self.weight_map.zeros:
            if (name, None) in self.missing:
                self.parameters[name].data.zero_()
                self.missing.discard((name, None))
        absent = {name for name, _ in self.missing if name in self.weight_map.optional}
        if self.weight_map.optional:
            self.model.absent = frozenset(absent)  # type: ignore[assignment]
        self.missing = {each for each in self.missing if each[0] not in absent}
        missing = self.wanted()
        if missing:
            raise LoadError(f"missing tensors: {listed(missing)}")
        for layer in self.quantized.values():
            layer.finish()


__all__ = ["ParameterFiller", "RowOrder", "Shard", "StackedExperts", "TensorFile", "WeightMap"]

__getattr__ = module_getattr(
    __name__, {"Together": "jackfield.core.loading.weight_map.StackedExperts"}
)
