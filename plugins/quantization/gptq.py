"""GPTQ checkpoints: 4 or 8 bits by groups of columns, with act-order, symmetric or not.

Layout (as AutoGPTQ and GPTQModel write it): `qweight` [K * bits / 32, N] packs neighbouring
columns, the first in the lowest bits; `qzeros` [G, N * bits / 32] the zeros, minus one in version
1; `scales` [G, N]; `g_idx` [K] the group of each column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ...core.errors import ConfigError, LoadError, listed
from ...core.loading.quantization_config import ConfigReader, is_ignored, name_matches
from ...core.nn.quantized import Axis, LinearSpec, QuantizedWeightLinear, TensorSpec
from ...core.nn.quantized_weight import WORD_BITS, QuantizedWeight
from .grouped import Grouped, join, own_groups, unpack_along
from .rtn import read_group_size

IN_ORDER = -1
"""Group number under `load_format=dummy`; no checkpoint has a negative one."""


class Gptq:
    """`quantization_config` fields: bits (4, 8), group_size, sym, desc_act, checkpoint_format
    ("gptq", "gptq_v2"), lm_head, dynamic (GPTQModel's rules by module name),
    modules_in_block_to_quantize, modules_to_not_convert.
    """

    name: ClassVar[str] = "gptq"

    def __init__(self, read: ConfigReader) -> None:
        self.bits = read.choice("bits", (4, 8), None)
        if self.bits is None:
            raise read.refuse("bits", "4 or 8")
        self.group_size = read_group_size(read, 128)
        self.unit = max(self.group_size, WORD_BITS // self.bits)
        read.flag("sym", True)
        self.sorted = read.flag("desc_act", False)
        layout = read.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        self.zero_offset = 1 if layout == "gptq" else 0
        self.head = read.flag("lm_head", False)
        self.ignored = read.names("modules_to_not_convert")
        self.only = _flat(read, "modules_in_block_to_quantize")
        self.rules = _rules(read)

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Gptq:
        return cls(ConfigReader(config))

    def layer(self, spec: LinearSpec) -> GptqLinear | None:
        if spec.role == "embedding" or (spec.role == "head" and not self.head):
            return None
        if is_ignored(spec, self.ignored, "modules_to_not_convert"):
            return None
        sources = spec.sources.values()
        if self.only and not any(name_matches(s, only) for s in sources for only in self.only):
            return None
        bits, group_size = self.bits, self.group_size
        for pattern, rule in self.rules:
            hits = [re.match(pattern, source) is not None for source in sources]
            if not any(hits):
                continue
            if not all(hits):
                raise ConfigError(
                    f"quantization_config.dynamic: {pattern!r} names some of "
                    f"{listed(sources, 4)}, which are computed as one layer",
                    param="quantization_config.dynamic",
                )
            if rule is None:
                return None
            bits = rule.choice("bits", (4, 8), bits)
            group_size = read_group_size(rule, group_size)
            break
        return GptqLinear(spec, bits, group_size, self.zero_offset, sorted=self.sorted)


def _flat(read: ConfigReader, field: str) -> tuple[str, ...]:
    value = read.values.get(field)
    if isinstance(value, list) and all(isinstance(part, list) for part in value):
        value = [name for part in value for name in part]
    return ConfigReader({field: value}, read.name).names(field)


def _rules(read: ConfigReader) -> list[tuple[str, ConfigReader | None]]:
    """Return patterns in order; None: the layer is not quantized."""
    dynamic = read.inner("dynamic")
    rules: list[tuple[str, ConfigReader | None]] = []
    for pattern in dynamic.values if dynamic else ():
        assert dynamic is not None
        rule = None if pattern.startswith("-:") else dynamic.inner(pattern)
        try:
            re.compile(pattern.removeprefix("-:").removeprefix("+:"))
        except re.error as error:
            raise read.refuse("dynamic", f"regular expressions ({error})") from error
        rules.append((pattern.removeprefix("-:").removeprefix("+:"), rule))
    return rules


class GptqLinear(QuantizedWeightLinear):
    def __init__(
        self, spec: LinearSpec, bits: int, group_size: int, zero_offset: int, *, sorted: bool
    ) -> None:
        super().__init__(spec)
        self.bits = bits
        self.one_group = group_size == -1
        self.group_size = spec.in_features if self.one_group else group_size
        self.sorted = sorted and self.group_size < spec.in_features
        """Whether columns were sorted, with the order in g_idx."""
        self.zero_offset = zero_offset
        parts = WORD_BITS // bits
        if spec.in_features % parts or any(rows % parts for rows in spec.shards.values()):
            raise ConfigError(
                f"quantization_config.bits: {spec.prefix} of {spec.in_features} columns does not "
                f"fill words of {parts} numbers",
                param="quantization_config.bits",
            )

    def tensors(self, out_features: int) -> Mapping[str, TensorSpec]:
        size, parts = self.spec.in_features, WORD_BITS // self.bits
        groups = -(-size // self.group_size)
        step = 2.0 / (1 << self.bits) * (3.0 / size) ** 0.5
        by_group: Axis | None = None if self.one_group else ("in", self.group_size)
        words = (torch.int32,)
        return {
            "qweight": TensorSpec(
                (size // parts, out_features), words, axes=(("in", parts), ("out", 1))
            ),
            "qzeros": TensorSpec(
                (groups, out_features // parts), words, axes=(by_group, ("out", parts))
            ),
            "scales": TensorSpec(
                (groups, out_features), dummy=step, axes=(by_group, ("out", 1))
            ),
            "g_idx": TensorSpec(
                (size,), (torch.int32, torch.int64), optional=not self.sorted,
                dummy=IN_ORDER if self.sorted else None, axes=(("in", 0 if self.sorted else 1),),
            ),
        }  # fmt: skip

    def pack(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> QuantizedWeight:
        mask = (1 << self.bits) - 1
        parts = []
        for shard in self.spec.shards:
            shard_tensors = shards[shard]
            zeros = (unpack_along(shard_tensors["qzeros"], self.bits, 1) + self.zero_offset) & mask
            groups = own_groups(shard_tensors.get("g_idx"), self.sharding)
            if groups is not None and int(groups.max()) == IN_ORDER:
                groups = None
            if groups is not None and int(groups.max()) >= len(zeros):
                raise LoadError(f"g_idx names group {int(groups.max())} of {len(zeros)}")
            values = unpack_along(shard_tensors["qweight"], self.bits, 0).t()
            parts.append(Grouped(values, shard_tensors["scales"], zeros, groups))
        return join(parts, self.bits, self.group_size)
