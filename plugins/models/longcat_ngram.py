"""LongCat-Flash-Lite: LongCat-Flash with n-gram embeddings.

Each token, and each n-gram that ends in it, is hashed into embedding tables; its embedding is the
mean of its own and of those, each projected (arXiv 2601.21204).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.state.layer import StateLayer
from ...core.parallel.sharding import Sharding
from ...core.protocols.models import HiddenStates
from .blocks import BlockParts
from .longcat import LongcatDecoder, LongcatFlashForCausalLM, LongcatWeightMap

DIGITS, BASE = 3, 256
"""A token's id as digits, each exact in 16 bits."""


class EarlierTokens(StateLayer):
    """Keeps the last tokens of each sequence, as digits in the state of a convolution with one-hot
    kernels.
    """

    kernel: torch.Tensor
    powers: torch.Tensor

    def __init__(self, count: int, build: BuildContext) -> None:
        channels = count * DIGITS
        super().__init__(conv=((count, channels), build.dtype))
        self.operations, self.count = build.operations, count
        kernel = torch.zeros(channels, count + 1, dtype=build.dtype, device=build.device)
        for channel in range(channels):
            kernel[channel, count - 1 - channel // DIGITS] = 1.0
        self.register_buffer("kernel", kernel, persistent=False)
        powers = torch.tensor([BASE**digit for digit in range(DIGITS)], device=build.device)
        self.register_buffer("powers", powers, persistent=False)

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens] → [num_tokens, count]: the token before each, the one before that, …; 0 for
        none.
        """
        digits = input_ids[:, None] // self.powers % BASE
        kept = self.operations.causal_conv(
            digits.to(self.kernel.dtype).repeat(1, self.count), self.kernel, None,
            self.state("conv"), context.layout.state_rows, silu=False,
        )  # fmt: skip
        earlier = kept.view(len(input_ids), self.count, DIGITS).long()
        return (earlier * self.powers).sum(-1)


class Tables(nn.Module):
    """weight: [rows of all tables, size], sharded by rows of each table."""

    def __init__(self, rows: list[int], size: int, build: BuildContext) -> None:
        super().__init__()
        self.group = build.ranks.tensor
        self.shards: dict[str, slice] = {}
        self.shardings: dict[str, Sharding] = {}
        self.starts, self.stops, offsets, end = [], [], [], 0
        for table, count in enumerate(rows):
            each = -(-count // self.group.size)
            start = min(self.group.rank * each, count)
            stop = min(start + each, count)
            self.shards[str(table)] = slice(end, end + stop - start)
            self.starts.append(start)
            self.stops.append(stop)
            offsets.append(end - start)
            end += stop - start
        self.weight = nn.Parameter(build.empty(end, size))
        if self.group.size > 1:
            own = {name: (slice(self.starts[n], self.stops[n]),)
                   for n, name in enumerate(self.shards)}  # fmt: skip
            sizes = {name: rows[n] for n, name in enumerate(self.shards)}
            self.shardings["weight"] = Sharding(0, sizes, own)
        for name, numbers in (("first", self.starts), ("end", self.stops), ("offset", offsets)):
            self.register_buffer(name, torch.tensor(numbers, device=build.device), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of each table, zeros for those of another rank: [num_tokens, num_tables] →
        [num_tokens, num_tables * size]"""
        places: Any = self.get_buffer("offset") + ids
        if self.group.size == 1:
            return F.embedding(places, self.weight).flatten(1)
        others = (ids < self.get_buffer("first")) | (ids >= self.get_buffer("end"))
        rows = F.embedding(places.masked_fill(others, 0), self.weight)
        return rows.masked_fill_(others[..., None], 0.0).flatten(1)


class Projections(nn.Module):
    """weight: [hidden_size, num_tables * size], one projection per table."""

    def __init__(self, tables: int, size: int, hidden_size: int, build: BuildContext) -> None:
        super().__init__()
        self.operations = build.operations
        self.shards = {
            str(table): (slice(None), slice(table * size, (table + 1) * size))
            for table in range(tables)
        }
        self.weight = nn.Parameter(build.empty(hidden_size, tables * size))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.operations.linear(rows, self.weight)


class NgramEmbedding(nn.Module):
    """Sum of the n-gram embeddings of each token, within its text."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf: Any = config.hf_config
        earlier, splits = hf.emb_neighbor_num - 1, hf.emb_split_num
        self.num_tables = earlier * splits
        if hf.hidden_size % self.num_tables:
            raise ConfigError(
                f"emb_split_num: {splits} tables for each of {earlier} lengths do not divide "
                f"hidden_size {hf.hidden_size}", param="emb_split_num",
            )  # fmt: skip
        if config.vocab_size > BASE**DIGITS:
            raise ConfigError(
                f"vocab_size: {config.vocab_size} tokens are more than {BASE**DIGITS}",
                param="vocab_size",
            )
        first = int(hf.ngram_vocab_size_ratio * config.vocab_size) + 1
        rows = [first + 2 * table for table in range(self.num_tables)]
        size = hf.hidden_size // self.num_tables
        self.group = build.ranks.tensor
        self.earlier = EarlierTokens(earlier, build)
        self.tables = Tables(rows, size, build)
        self.projections = Projections(self.num_tables, size, hf.hidden_size, build)
        ends = hf.eos_token_id if isinstance(hf.eos_token_id, list) else [hf.eos_token_id]
        factors = [
            [pow(config.vocab_size, lag, rows[table]) if lag <= table // splits + 1 else 0
             for table in range(self.num_tables)]
            for lag in range(1, earlier + 1)
        ]  # fmt: skip
        for name, numbers in (("ends", ends), ("rows", rows), ("factors", factors)):
            self.register_buffer(name, torch.tensor(numbers, device=build.device), persistent=False)

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        earlier = self.earlier(input_ids, context)
        ends = (earlier[..., None] == self.get_buffer("ends")).any(-1)
        visible = earlier.masked_fill(ends.cumsum(-1) > 0, 0)
        numbers = input_ids[:, None] + (visible[..., None] * self.get_buffer("factors")).sum(1)
        out: torch.Tensor = self.projections(self.tables(numbers % self.get_buffer("rows")))
        return self.group.all_reduce(out) if self.group.size > 1 else out


class LongcatNgramDecoder(LongcatDecoder):
    def __init__(self, parts: BlockParts) -> None:
        super().__init__(parts)
        self.ngram = NgramEmbedding(parts.config, parts.build)

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> HiddenStates:
        own = self.embed(input_ids, context.positions)
        total = own.float() + self.ngram(input_ids, context).float()
        mean = (total / (1 + self.ngram.num_tables)).to(own.dtype)
        return super().forward(input_ids, context.with_incoming(mean))


PARTS = {"embedders": "tables", "post_projs": "projections"}
"""Checkpoint's names per table → the modules of all tables."""


@dataclasses.dataclass(frozen=True)
class NgramWeightMap(LongcatWeightMap):
    """Merges the tables and their projections as shards."""

    def target(self, name: str) -> tuple[str, str | None]:
        renamed = self.renamed(name)
        at = re.fullmatch(r"model\.ngram_embeddings\.(\w+)\.(\d+)\.weight", renamed)
        if at is None or at[1] not in PARTS:
            return super().target(name)
        return f"model.ngram.{PARTS[at[1]]}.weight", at[2]

    def source(self, parameter: str, shard: str | None = None) -> str:
        for theirs, part in PARTS.items():
            if parameter == f"model.ngram.{part}.weight" and shard is not None:
                return f"model.ngram_embeddings.{theirs}.{shard}.weight"
        return super().source(parameter, shard)


class LongcatFlashNgramForCausalLM(LongcatFlashForCausalLM):
    decoder = LongcatNgramDecoder
    weight_map = NgramWeightMap(
        stacked=LongcatFlashForCausalLM.weight_map.stacked,
        tied=LongcatFlashForCausalLM.weight_map.tied,
        names=LongcatFlashForCausalLM.weight_map.names,
        ignored=("model.mtp.", "model.ngram_embeddings.word_embeddings."),
    )
