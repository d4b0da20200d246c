"""Maps checkpoint names to modules, by `transformers`' own renamings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from ....core.loading.weight_map import StackedExperts, WeightMap
from .attention import refused

ROOT = "hf"
"""Name of transformers' model in ours."""
INNER = {"gate_up_proj": ("gate", "up"), "down_proj": ("",)}
"""Layers of experts (same names here) → their shards."""
ONE_EXPERT = re.compile(r"(.+)\.(\d+)\.(\w+)\.(\w+)")
"""One expert's tensor: module, number, layer, and tensor name."""


@dataclass(frozen=True)
class ModuleWeightMap(WeightMap):
    renamings: tuple[WeightRenaming, ...] = ()
    shards: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Checkpoint name of an expert's layer → layer here, and shard."""
    products: frozenset[str] = frozenset()
    """Names of modules that `Projection` replaces."""
    experts: frozenset[str] = frozenset()
    """Names of modules that `RoutedExperts` replaces."""
    unexpected: tuple[str, ...] = ()
    """Patterns of names that transformers ignores."""

    @classmethod
    def of(cls, model: Any, products: set[str], experts: set[str]) -> ModuleWeightMap:
        """Read transformers' renamings for a model. Raises ConfigError if it transforms tensors
        otherwise than by stacking experts.
        """
        renamings, shards = [], {}
        transforms: Any = get_model_conversion_mapping(model) or ()
        for transform in transforms:
            if isinstance(transform, WeightRenaming):
                renamings.append(transform)
                continue
            target = transform.target_patterns[0].rpartition(".")[2]
            kinds = [type(operation).__name__ for operation in transform.operations]
            known = [["MergeModulelist"], ["MergeModulelist", "Concatenate"]]
            others = [name for name, _ in model.named_parameters() if name.endswith(f".{target}")]
            if kinds not in known or target not in INNER or others:
                raise refused(f"its checkpoints are converted in a way of their own ({target})")
            for name, shard in zip(transform.source_patterns, INNER[target], strict=True):
                shards[name.removesuffix(".weight").rpartition(".")[2]] = target, shard
        tied = {f"{ROOT}.{k}": f"{ROOT}.{v}" for k, v in model.all_tied_weights_keys.items()}
        return cls(
            tied=tied,
            renamings=tuple(renamings),
            shards=shards,
            products=frozenset(products),
            experts=frozenset(experts),
            unexpected=tuple(model._keys_to_ignore_on_load_unexpected or ()),
        )

    def renamed(self, name: str) -> str:
        for renaming in self.renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def together_at(self, name: str) -> tuple[str, StackedExperts] | None:
        module, _, last = self.renamed(name).rpartition(".")
        if module not in self.experts or last not in INNER:
            return None
        parameter = f"{last}.weight"
        return f"{ROOT}.{module}.{parameter}", StackedExperts(parameter, INNER[last], joined=True)

    def pieces(
        self, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, str | None, torch.Tensor]]:
        if not any(re.search(pattern, name) for pattern in self.unexpected):
            yield from super().pieces(name, tensor)

    def target(self, name: str) -> tuple[str, str | None]:
        renamed = self.renamed(name)
        expert = ONE_EXPERT.fullmatch(renamed)
        if expert is not None and expert[1] in self.experts and expert[3] in self.shards:
            layer, shard = self.shards[expert[3]]
            return (
                f"{ROOT}.{expert[1]}.{layer}.{expert[4]}",
                ".".join(filter(None, (expert[2], shard))),
            )
        module, _, leaf = renamed.rpartition(".")
        parts = module.split(".")
        for count in range(len(parts), 0, -1):
            if (outer := ".".join(parts[:count])) in self.products:
                inner = ".".join([*parts[count:], leaf])
                return f"{ROOT}.{outer}.linear.{inner}", None
        return f"{ROOT}.{renamed}", None

    def source(self, parameter: str, shard: str | None = None) -> str:
        """Return transformers' name for (parameter, shard)."""
        name = parameter.removeprefix(f"{ROOT}.")
        expert, _, part = (shard or "").partition(".")
        if shard is not None:
            module, layer, leaf = name, "", ""
            for known in self.experts:
                if name.startswith(f"{known}."):
                    module, (layer, _, leaf) = known, name[len(known) + 1 :].partition(".")
            stored = [k for k, v in self.shards.items() if v == (layer, part)]
            if stored:
                return ".".join(filter(None, (module, expert, stored[0], leaf)))
            return f"{name} (shard {shard})"
        for outer in self.products:
            if name == f"{outer}.linear" or name.startswith(f"{outer}.linear."):
                return outer + name[len(f"{outer}.linear") :]
        return name
