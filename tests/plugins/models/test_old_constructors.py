"""Blocks and decoders written for version 2 of the hooks compute what those of version 3 do."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants import plugin_of
from torch import nn

from jackfield.core.errors import ConfigError
from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.paged_model import PagedModel
from jackfield.plugins.conformance.rank_threads import thread_ranks
from jackfield.plugins.models.decoder import Block, BlockParts, Decoder
from jackfield.plugins.models.qwen3 import Qwen3ForCausalLM

from helpers import make_checkpoint


class NewBlock(Block):
    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__(parts, layer)
        self.input_layernorm.eps = 0.1 * (layer + 1)  # type: ignore[assignment]


class NewDecoder(Decoder):
    block = NewBlock

    def __init__(self, parts: BlockParts) -> None:
        super().__init__(parts)
        self.norm.eps = float(parts.config.hidden_size)


class OldBlock(Block):
    def __init__(self, config: Any, layer: int, build: Any, attention: Any, mlp: Any) -> None:
        super().__init__(config, layer, build, attention, mlp)  # type: ignore[call-arg]
        self.input_layernorm.eps = 0.1 * (layer + 1)  # type: ignore[assignment]


class BareOldBlock(Block):
    """Makes its own parts."""

    def __init__(self, config: Any, layer: int, build: Any, attention: Any, mlp: Any) -> None:
        nn.Module.__init__(self)
        for name in self.norms:
            setattr(self, name, self.make_norm(config.hf_config, build))
        self.self_attn, self.mlp = attention(config, layer, build), mlp(config, layer, build)
        self.input_layernorm.eps = 0.1 * (layer + 1)  # type: ignore[assignment]


class OldDecoder(Decoder):
    block = OldBlock

    def __init__(self, config: Any, build: Any, attention: Any, mlp: Any) -> None:
        super().__init__(config, build, attention=attention, mlp=mlp)  # type: ignore[call-arg]
        self.norm.eps = float(config.hidden_size)


class BareOldDecoder(OldDecoder):
    block = BareOldBlock


def family(decoder: type[Decoder]) -> Any:
    return type("Family", (Qwen3ForCausalLM,), {"decoder": decoder})


def logits(folder: Path, decoder: type[Decoder]) -> torch.Tensor:
    plugins = load_plugins(extra=(plugin_of("model", "Qwen3ForCausalLM", family(decoder)),))
    return PagedModel(folder, "float32", plugins=plugins).run({0: [5, 6, 7, 8]})[0]


@pytest.mark.parametrize("decoder", [OldDecoder, BareOldDecoder])
def test_constructors_of_version_2_make_what_those_of_version_3_do(
    decoder: type[Decoder], tmp_path: Path
) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        expected = logits(folder, NewDecoder)
        assert not torch.equal(expected, logits(folder, Decoder))
    with pytest.warns(DeprecationWarning) as caught:
        assert torch.equal(logits(folder, decoder), expected)
    messages = [str(each.message) for each in caught]
    block = decoder.block.__name__
    for text in (
        f"{decoder.__name__}(config, build, attention, mlp) is now {decoder.__name__}(parts);",
        f"{block}(config, layer, build, attention, mlp) is now {block}(parts, layer);",
    ):
        assert any(message.startswith(text) for message in messages), messages


def test_a_class_of_version_2_says_itself_that_ranks_can_divide_it(tmp_path: Path) -> None:
    """From version 3 on it inherits that."""
    folder = make_checkpoint("qwen3", tmp_path)

    def build(cls: Any, version: int) -> None:
        plugin: Any = plugin_of("model", "Qwen3ForCausalLM", cls)
        plugin.jackfield_api = version
        PagedModel(
            folder, "float32", plugins=load_plugins(extra=(plugin,)), ranks=thread_ranks(2)[0]
        )

    inherits = type("Inherits", (Qwen3ForCausalLM,), {})
    build(inherits, 3)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        build(inherits, 2)
    build(type("Says", (Qwen3ForCausalLM,), {"tensor_parallel": True}), 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        build(type("Refuses", (Qwen3ForCausalLM,), {"tensor_parallel": False}), 3)
