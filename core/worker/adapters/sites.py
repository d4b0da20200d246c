"""Where adapters change a model, by the names of its checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...adapters.file import (
    AdapterFile,
    ExpertsLowRank,
    LowRank,
    ReadTensor,
    TokenRows,
    is_finite,
)
from ...errors import ConfigError, LoadError, listed
from ...loading.weight_map import StackedExperts, WeightMap
from ...nn.adapter_sites import AdapterState, Site
from ...nn.adapters import HEAD, adapt
from ...nn.attention import Attention
from ...nn.embedding import Embedding
from ...nn.experts import ExpertLinear, Router
from ...nn.linear import Linear
from ...nn.quantized import QuantizedEmbedding, QuantizedLinear
from ...parallel.missing_layer import missing_prefixes
from ...parallel.sharding import Sharding
from .host_change import ExpertPieces, HostChange, Piece
from .layer_shapes import (
    in_features,
    is_head,
    of_experts,
    out_features,
    sharding_of,
    vocabulary_of,
)

FIRST, DOWN = "first", "down"
PARAM = "lora_path"


class Sites:
    """The layers of one rank's model that adapters may change."""

    def __init__(self, model: nn.Module, *, first_rank: bool = True) -> None:
        """Give the model's layers their sites. first_rank: the one whose layers have the biases of
        products that ranks add."""
        self.model = model
        self.state = AdapterState()
        self.weight_map: WeightMap = model.weight_map  # type: ignore[assignment]
        self._own_names = dataclasses.replace(self.weight_map, prefixes={}, parts={}, names={})
        """For names that are the model's own: trainers name layers as `transformers` does, which
        may be otherwise than in its checkpoints."""
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.sites = adapt(model, self.state)
        self._elsewhere = missing_prefixes(model)
        self._first_rank = first_rank

    def linear(self) -> Iterator[tuple[Site, Any]]:
        """Yield the sites that have pools, with their layers."""
        for name, site in self.sites.items():
            layer = self.modules[name]
            if isinstance(layer, Router | Linear | QuantizedLinear) and not is_head(layer):
                yield site, layer

    # ------------------------------------------------------------ what adapters change

    def changes(self, file: AdapterFile) -> dict[str, HostChange]:
        """Return what an adapter changes, by the keys of sites; those of other stages are left out.
        Raises ConfigError for what cannot be served."""
        changes: dict[str, HostChange] = {}
        for each in file.low_rank:
            self._low_rank(each, changes)
        for experts in file.experts:
            self._experts(experts, changes)
        for name, read in file.replaced.items():
            self._replaced(name, read, changes)
        heads = {each.name for each in file.token_rows if self._key(each.name).endswith(HEAD)}
        for rows in file.token_rows:
            self._token_rows(rows, changes, head_too=not heads)
        for key, change in changes.items():
            lists = (pieces for each in change.experts.values() for pieces in each.pieces.values())
            for pieces in (change.pieces, *lists):
                if len({piece.part for piece in pieces}) < len(pieces):
                    raise ConfigError(
                        f"{PARAM}: the adapter changes {key} twice, under two names", param=PARAM
                    )
            site = self.sites[key.removesuffix(HEAD)]
            if not site.called and not key.endswith(HEAD):
                raise ConfigError(
                    f"{PARAM}: the adapter changes {key}, and this model computes with that weight "
                    "in another form; train without it",
                    param=PARAM,
                )
        return changes

    def _change(self, changes: dict[str, HostChange], key: str) -> HostChange:
        return changes.setdefault(key, HostChange())

    def _locate(self, name: str, tensor: torch.Tensor) -> list[tuple[str, str | None, Any]]:
        """Return where a tensor of the checkpoint goes: the module's name, shard, this part; [] for
        another stage's. Raises ConfigError."""
        own = self.weight_map.own(name)
        if own is None:
            raise ConfigError(
                f"{PARAM}: the adapter changes {name.rpartition('.')[0]}, which is not of the text "
                "model that is served",
                param=PARAM,
            )
        if self.weight_map.is_transposed(own) and tensor.dim() == 2:
            tensor = tensor.t()
        for names in (self.weight_map, self._own_names):
            try:
                pieces = list(names.pieces(own, tensor))
            except LoadError as error:
                raise ConfigError(f"{PARAM}: {error.message}", param=PARAM) from error
            places = [(*self._place(parameter), shard, piece) for parameter, shard, piece in pieces]
            if all(here for here, *_ in places):
                return [(module, *rest) for _, module, *rest in places if module]  # type: ignore[misc]
        raise self._not_here(name)

    def _place(self, parameter: str) -> tuple[bool, str]:
        """Return whether the model has a parameter, and the name of its module, "" if another stage
        has it."""
        parameter = self._tied(parameter)
        if self._elsewhere and parameter.startswith(self._elsewhere):
            return True, ""
        module, _, leaf = parameter.rpartition(".")
        return module in self.modules and leaf in ("weight", "bias"), module

    def _tied(self, parameter: str) -> str:
        """Return where a head's parameter is, if the model ties it to its embeddings."""
        if parameter.rpartition(".")[0] in self.modules:
            return parameter
        return self.weight_map.tied.get(parameter, parameter)

    def _low_rank(self, each: LowRank, changes: dict[str, HostChange]) -> None:
        a, b = self._matrices(each)
        names: set[str] = set()
        for module, shard, rows in self._locate(f"{each.name}.weight", b):
            layer = self.modules[module]
            names.add(module)
            if isinstance(layer, ExpertLinear) or of_experts(layer):
                self._expert(module, layer, shard or "", each.scale, a, rows, changes)
                continue
            if isinstance(layer, Embedding | QuantizedEmbedding) or is_head(layer):
                key = module if each.embedding else module + HEAD
                self._vocabulary(each, layer, key, a, rows, changes)
                continue
            if module not in self.sites:
                raise self._not_here(each.name)
            extra = {
                name: None if read is None else self._vector(each, shard, read, at)
                for name, read, at in (
                    ("bias", each.bias, module), ("magnitude", each.magnitude, module),
                )
            }  # fmt: skip
            number, span, own_a, own_b = self._divided(each.name, module, layer, shard, a, rows)
            if each.pairs:
                own_b = _halves(own_b, self._head_dim(module))
            shard_of = sharding_of(layer)
            if shard_of is not None and shard_of.dim == 0:
                extra = {
                    name: None if vector is None else shard_of.part(shard, vector)
                    for name, vector in extra.items()
                }
            elif shard_of is not None and not self._first_rank:
                extra["bias"] = None
            change = self._change(changes, module)
            change.pieces.append(Piece(span, own_a, own_b, each.scale, number, **extra))
        if len(names) > 1:
            raise ConfigError(
                f"{PARAM}: {each.name} is several layers here ({listed(sorted(names))})",
                param=PARAM,
            )

    def _head_dim(self, module: str) -> int:
        """Return the size of a head of the attention that a projection is of."""
        parent = f"{module.rpartition('.')[0]}."
        for name, layer in self.modules.items():
            if name.startswith(parent) and isinstance(layer, Attention):
                return layer.spec.head_dim
        raise self._not_here(module)

    def _matrices(self, each: LowRank) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = each.a(), each.b()
        for name, tensor, shape in (
            ("A", a, (each.rank, each.in_features)), ("B", b, (each.out_features, each.rank)),
        ):  # fmt: skip
            if tuple(tensor.shape) != shape:
                raise ConfigError(
                    f"{PARAM}: {each.name} has {name} of shape {tuple(tensor.shape)}, not {shape}",
                    param=PARAM,
                )
            if not is_finite(tensor):
                raise ConfigError(
                    f"{PARAM}: {each.name} has values in {name} that are no numbers (NaN or "
                    "infinite)",
                    param=PARAM,
                )
        return a, b

    def _vector(
        self, each: LowRank, shard: str | None, read: ReadTensor, module: str
    ) -> torch.Tensor:
        """Return a vector of a layer's output features in the order of this model's, of one
        shard."""
        vector = read()
        if tuple(vector.shape) != (each.out_features,):
            raise ConfigError(
                f"{PARAM}: {each.name} has a vector of shape {tuple(vector.shape)} for "
                f"{each.out_features} features",
                param=PARAM,
            )
        for at, other, rows in self._locate(f"{each.name}.weight", vector[:, None]):
            if at == module and other == shard:
                return rows[:, 0].float()
        raise AssertionError("the vector goes where the matrix does")

    def _divided(
        self,
        name: str,
        module: str,
        layer: Any,
        shard: str | None,
        a: torch.Tensor,
        b: torch.Tensor,
    ) -> tuple[int, slice, torch.Tensor, torch.Tensor]:
        """Return the number of the part, its output features on this rank, and this rank's part of
        both matrices. Raises ConfigError for other sizes than the layer's."""
        shards: Mapping[str, slice] = getattr(layer, "shards", None) or {}
        if shards and shard is not None:
            number, span = list(shards).index(shard), shards[shard]
        else:
            number, span = 0, slice(0, out_features(layer))
        sharding = sharding_of(layer)
        try:
            if sharding is not None:
                if sharding.dim == 0:
                    b = sharding.part(shard, b)
                else:
                    a = sharding.part(shard, a)
        except LoadError as error:
            raise ConfigError(f"{PARAM}: {name} {error.message}", param=PARAM) from error
        expected = (in_features(layer), span.stop - span.start)
        if (a.shape[1], b.shape[0]) != expected:
            raise ConfigError(
                f"{PARAM}: {name} is of a layer of {a.shape[1]} to {b.shape[0]} features; this "
                f"model's has {expected[0]} to {expected[1]}",
                param=PARAM,
            )
        return number, span, a, b

    def _vocabulary(
        self,
        each: LowRank,
        layer: Any,
        key: str,
        a: torch.Tensor,
        b: torch.Tensor,
        changes: dict[str, HostChange],
    ) -> None:
        """Add a change of embeddings or a head: every rank has all of it."""
        vocab, width = vocabulary_of(layer)
        shape = (vocab, width) if each.embedding else (width, vocab)
        if each.embedding:
            b = each.b()  # Rows of an embedding's B are not rows of its weight.
        if (a.shape[1], b.shape[0]) != shape:
            raise ConfigError(
                f"{PARAM}: {each.name} is of {a.shape[1]} to {b.shape[0]} features; this model's "
                f"has {shape[0]} to {shape[1]}",
                param=PARAM,
            )
        if each.magnitude is not None or (each.bias is not None and each.embedding):
            raise ConfigError(
                f"{PARAM}: DoRA of {each.name} (use_dora) is not served; train without it",
                param=PARAM,
            )
        bias = None if each.bias is None else each.bias().float()
        change = self._change(changes, key)
        change.pieces.append(Piece(slice(0, shape[1]), a, b, each.scale, 0, bias))

    def _experts(self, each: ExpertsLowRank, changes: dict[str, HostChange]) -> None:
        own = self.weight_map.own(each.name)
        at = None if own is None else self.weight_map.together_at(own)
        module = each.name if at is None else at[0].rpartition(".")[0]
        if self._elsewhere and f"{module}.".startswith(self._elsewhere):
            return
        layer = self.modules.get(module)
        if layer is None or not (isinstance(layer, ExpertLinear) or of_experts(layer)):
            raise self._not_here(each.name)
        if at is None:
            # `transformers` joins the tensors that such a checkpoint has for each expert.
            first = next(iter(layer.shards), "").partition(".")[0]
            parts = tuple(
                shard.partition(".")[2]
                for shard in layer.shards if shard.partition(".")[0] == first
            )  # fmt: skip
            together = StackedExperts("", parts, joined=True)
        else:
            together = dataclasses.replace(at[1], transposed=False, columns=None)
        a, b = each.a(), each.b()
        if a.shape[0] != each.num_experts or b.shape[0] != each.num_experts:
            raise ConfigError(f"{PARAM}: {each.name} is not of all experts", param=PARAM)
        for shard, rows in together.shards(b):
            expert = int(shard.partition(".")[0])
            self._expert(module, layer, shard, each.scale, a[expert], rows, changes)

    def _expert(
        self,
        module: str,
        layer: Any,
        shard: str,
        scale: float,
        a: torch.Tensor,
        b: torch.Tensor,
        changes: dict[str, HostChange],
    ) -> None:
        """Add a change of one layer of one expert."""
        share = layer.expert_share
        if share is not None and share.is_elsewhere(shard):
            return
        if shard not in layer.shards:
            raise self._not_here(f"{module} ({shard})")
        sharding = sharding_of(layer)
        if sharding is not None:
            if sharding.dim == 0:
                b = sharding.part(shard, b)
            else:
                a = sharding.part(shard, a)
        expert = shard.partition(".")[0]
        shards = [each for each in layer.shards if each.partition(".")[0] == expert]
        start = layer.shards[shards[0]].start
        bounds = (0, *(layer.shards[each].stop - start for each in shards))
        rows = layer.shards[shard]
        span = slice(rows.start - start, rows.stop - start)
        if (a.shape[1], b.shape[0]) != (in_features(layer), span.stop - span.start):
            raise ConfigError(
                f"{PARAM}: {module}, expert {expert}, is of a layer of {a.shape[1]} to "
                f"{b.shape[0]} features; this model's has {in_features(layer)} to "
                f"{span.stop - span.start}",
                param=PARAM,
            )
        numbers = list(dict.fromkeys(each.partition(".")[0] for each in layer.shards))
        holder, _, last = module.rpartition(".")
        if holder not in self.sites:
            raise self._not_here(module)
        which = DOWN if last == "down_proj" else FIRST
        change = self._change(changes, holder)
        if which not in change.experts:
            change.experts[which] = ExpertPieces(len(numbers), in_features(layer), bounds)
        pieces = change.experts[which].pieces.setdefault(numbers.index(expert), [])
        pieces.append(Piece(span, a, b, scale, shards.index(shard)))

    def _replaced(self, name: str, read: ReadTensor, changes: dict[str, HostChange]) -> None:
        value = read()
        if not is_finite(value):
            raise ConfigError(f"{PARAM}: {name} has values that are no numbers", param=PARAM)
        leaf = name.rpartition(".")[2]
        own = self.weight_map.own(name)
        if own is None:
            raise self._not_here(name)
        for parameter, shard, piece in self.weight_map.pieces(own, value):
            tied = self._tied(parameter)
            if self._elsewhere and tied.startswith(self._elsewhere):
                continue
            module = tied.rpartition(".")[0]
            layer = self.modules.get(module)
            embeds = isinstance(layer, Embedding | QuantizedEmbedding) or is_head(layer)
            if embeds and leaf == "weight":
                vocab, width = vocabulary_of(layer)
                if tuple(piece.shape) != (vocab, width):
                    raise ConfigError(
                        f"{PARAM}: {name} has shape {tuple(piece.shape)}; this model's has "
                        f"{(vocab, width)}",
                        param=PARAM,
                    )
                head = tied != parameter or self._is_head(module)
                if head and getattr(layer, "bias", None) is not None:
                    raise ConfigError(
                        f"{PARAM}: a head with a bias is not replaced ({name})", param=PARAM
                    )
                self._change(changes, module + HEAD * head).weight = piece
                continue
            if module not in self.sites or leaf not in ("weight", "bias") or layer is None:
                raise ConfigError(
                    f"modules_to_save: {name} is not served; embeddings, heads, classifiers and "
                    "linear layers are",
                    param="modules_to_save",
                )
            self._layer(name, layer, shard, leaf, piece, self._change(changes, module))

    def _layer(
        self,
        name: str,
        layer: Any,
        shard: str | None,
        leaf: str,
        value: torch.Tensor,
        change: HostChange,
    ) -> None:
        """Replace a linear layer's weight or bias, or those of one of its parts."""
        sharding: Sharding | None = sharding_of(layer)
        try:
            if sharding is not None and (leaf == "weight" or sharding.dim == 0):
                value = sharding.part(shard, value)
        except LoadError as error:
            raise ConfigError(f"{PARAM}: {name} {error.message}", param=PARAM) from error
        shards: Mapping[str, slice] = getattr(layer, "shards", None) or {}
        span = slice(0, out_features(layer)) if shard is None else shards[shard]
        shape: tuple[int, ...] = (span.stop - span.start,)
        if leaf == "weight":
            shape = (*shape, in_features(layer))
        if tuple(value.shape) != shape:
            raise ConfigError(
                f"{PARAM}: {name} has shape {tuple(value.shape)}; this model's has {shape}",
                param=PARAM,
            )
        if leaf == "bias" and sharding is not None and sharding.dim == 1 and not self._first_rank:
            return
        (change.weights if leaf == "weight" else change.biases).append((span, value))

    def _key(self, name: str) -> str:
        """Return the key of an embedding or head by its name in checkpoints; "" if it is not
        here."""
        own = self.weight_map.own(f"{name}.weight")
        parameter = "" if own is None else self.weight_map.target(own)[0]
        tied = self._tied(parameter)
        module = tied.rpartition(".")[0]
        if module not in self.modules:
            return ""
        return module + HEAD * (tied != parameter or self._is_head(module))

    def _token_rows(
        self, rows: TokenRows, changes: dict[str, HostChange], *, head_too: bool
    ) -> None:
        """head_too: a head that is tied to these embeddings gets them."""
        order = sorted(range(len(rows.token_ids)), key=lambda number: rows.token_ids[number])
        ids = torch.tensor([rows.token_ids[number] for number in order], dtype=torch.int64)
        values = rows.rows()[order]
        key = self._key(rows.name)
        module = key.removesuffix(HEAD)
        if self._elsewhere and f"{module}.".startswith(self._elsewhere):
            return
        layer = self.modules.get(module)
        if not (isinstance(layer, Embedding | QuantizedEmbedding) or is_head(layer)):
            raise self._not_here(rows.name)
        vocab, width = vocabulary_of(layer)
        if values.shape[1] != width or int(ids[-1]) >= vocab or int(ids[0]) < 0:
            raise ConfigError(
                f"trainable_token_indices: {rows.name} has {vocab} tokens of {width} numbers here",
                param="trainable_token_indices",
            )
        tied = any(
            embedding.rpartition(".")[0] == module and head.rpartition(".")[0] not in self.modules
            for head, embedding in self.weight_map.tied.items()
        )
        for each in (key, *((module + HEAD,) if tied and head_too else ())):
            change = self._change(changes, each)
            change.token_ids, change.token_rows = ids, values

    def _is_head(self, module: str) -> bool:
        if is_head(self.modules[module]):
            return True
        return any(head.rpartition(".")[0] == module for head in self.weight_map.tied)

    def _not_here(self, name: str) -> ConfigError:
        return ConfigError(
            f"{PARAM}: the adapter changes {name}, and this model has no such layer that adapters "
            "can change",
            param=PARAM,
        )


def _halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return rows of queries or keys with a rotation's two channels half a head apart."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return pairs.transpose(1, 2).reshape(rows.shape)
