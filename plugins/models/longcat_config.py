"""LongCat-Flash-Lite's configuration: LongCat-Flash's, and how tokens are embedded together."""

from __future__ import annotations

from typing import Any

from transformers import LongcatFlashConfig

from .configs import check_count, wrong


class LongcatNgramConfig:
    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        """The number of layers is `num_layers`, whatever else a file says."""
        left_out = ("model_type", "num_hidden_layers")
        own = {name: value for name, value in config_dict.items() if name not in left_out}
        check_count(
            own, "num_layers", "hidden_size", "num_attention_heads", "vocab_size", "moe_topk",
            "emb_split_num",
        )  # fmt: skip
        ratio: Any = own.get("ngram_vocab_size_ratio")
        most = own.get("emb_neighbor_num")
        if type(ratio) not in (int, float) or not 0 < ratio < 1e6:
            raise wrong("ngram_vocab_size_ratio", ratio, "a positive number")
        if type(most) is not int or most < 2:
            raise wrong("emb_neighbor_num", most, "an integer of at least 2")
        if own.get("eos_token_id") is None:
            raise wrong("eos_token_id", None, "an integer or a list of integers")
        return LongcatFlashConfig(**own)
