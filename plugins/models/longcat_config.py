"""LongCat-Flash-Lite's configuration: LongCat-Flash's and the n-gram embedding's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import LongcatFlashConfig

from ...core.protocols.field_kinds import COUNT, INTEGER_OR_INTEGERS, FieldKind


class LongcatNgramConfig:
    config_fields: ClassVar[Mapping[str, FieldKind]] = {
        **dict.fromkeys(
            (
                "emb_split_num", "hidden_size", "moe_topk", "num_attention_heads", "num_layers",
                "vocab_size",
            ),
            COUNT.required(),
        ),
        "emb_neighbor_num": FieldKind(
            "an integer of at least 2", lambda value: type(value) is int and value >= 2
        ).required(),
        "eos_token_id": INTEGER_OR_INTEGERS.required(),
        "ngram_vocab_size_ratio": FieldKind(
            "a positive number", lambda value: type(value) in (int, float) and 0 < value < 1e6
        ).required(),
    }  # fmt: skip

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        """`num_layers` is the number of layers, even if other fields differ."""
        left_out = ("model_type", "num_hidden_layers")
        own = {name: value for name, value in config_dict.items() if name not in left_out}
        return LongcatFlashConfig(**own)
