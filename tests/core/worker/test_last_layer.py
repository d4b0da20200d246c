"""What follows the last layer's attention is computed for the tokens whose logits are read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants import plugin_of

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.parallel.ranks import Pipeline, Ranks
from jackfield.core.registry import load_plugins
from jackfield.core.worker.hidden_states import parts, take
from jackfield.plugins.conformance.paged_model import PagedModel
from jackfield.plugins.models.decoder import ParallelBlock, SelfAttention
from jackfield.plugins.models.llama import LlamaForCausalLM

from helpers import greedy_reference, make_checkpoint, reference_model


def count_rows(model: Any) -> Counter[int]:
    """Count, from now on, the tokens that each layer's MLP computes."""
    counts: Counter[int] = Counter()
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(
            lambda _, inputs, number=number: counts.update({number: inputs[0].shape[0]})
        )
    return counts


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "olmo2", "qwen3-moe"])
def test_the_last_mlp_computes_rows_that_are_asked_for(family: str, tmp_path: Path) -> None:
    model: Any = PagedModel(make_checkpoint(family, tmp_path), "float32")
    last = len(model.model.model.layers) - 1
    counts = count_rows(model.model)
    hidden = model.hidden({0: [5, 6, 7, 8, 9], 1: [3, 4, 5]})
    assert [len(part) for part in parts(hidden)] == [8, 8]
    assert counts == dict.fromkeys(range(last), 8)
    logits = model.logits(take(hidden, torch.tensor([4, 7], device=model.device)))
    assert counts[last] == 2
    torch.testing.assert_close(logits, model.logits(hidden)[[4, 7]], atol=1e-5, rtol=1e-5)


async def test_a_prompt_in_chunks_computes_it_once(tmp_path: Path) -> None:
    """Chunks in the middle of a prompt have no row of logits."""
    folder = make_checkpoint("qwen3", tmp_path)
    prompt, num_tokens = list(range(5, 45)), 4
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True,
        max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, block_size=8,
        num_gpu_blocks_override=40,
    )  # fmt: skip
    async with AsyncEngine(config) as engine:
        executor: Any = engine.core.executor
        counts = count_rows(executor._worker.runner.model)
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, detokenize=False)
        async for out in engine.generate(prompt, params):
            answer = list(out.outputs[0].token_ids)
    last = max(counts)
    assert counts[last] == num_tokens
    assert counts[0] == len(prompt) + num_tokens - 1
    assert answer == greedy_reference(reference_model(folder), prompt, num_tokens)[0]


class DoubledAttention(SelfAttention):
    """With a `forward` of its own, which no half of a block would call."""

    def forward(
        self, hidden: torch.Tensor, norm: Any, rotary: Any, context: Any, *, add: bool = True
    ) -> torch.Tensor:
        answer = super().forward(hidden, norm, rotary, context, add=False)
        return hidden + 2 * answer if add else 2 * answer


class Doubled(LlamaForCausalLM):
    attention = DoubledAttention


class Halved(LlamaForCausalLM):
    """With logits of its own, which knows only hidden states."""

    def compute_logits(self, hidden: Any) -> torch.Tensor:
        return self.lm_head.logits(hidden / 2, norm=None)


class Shifted(LlamaForCausalLM):
    """With a `forward` of its own, likewise."""

    def forward(self, input_ids: torch.Tensor, context: Any) -> Any:
        hidden = super().forward(input_ids, context)
        return hidden + 1


@pytest.mark.parametrize("model_class", [Doubled, Halved, Shifted])
def test_a_family_that_overrides_a_half_is_run_whole(
    model_class: type[LlamaForCausalLM], tmp_path: Path
) -> None:
    """As families did before there were halves."""
    folder = make_checkpoint("llama", tmp_path)
    plain: Any = PagedModel(folder, "float32")
    assert plain.model.model.unfinished
    plain.model.model.unfinished = False
    plugin = plugin_of("model", "LlamaForCausalLM", model_class)
    own: Any = PagedModel(folder, "float32", plugins=load_plugins(extra=[plugin]))
    assert not own.model.model.unfinished
    tokens = {0: [5, 6, 7, 8]}
    hidden, other = own.hidden(tokens), plain.hidden(tokens)
    assert hidden.shape == other.shape
    if model_class is Halved:
        assert torch.equal(hidden, other)
        other = plain.model.model.norm(other)
    else:
        assert (hidden - other).abs().max() > 0.01
    assert (own.logits(hidden) - plain.logits(other)).abs().max() > 1e-3


def test_stages_before_the_last_finish_their_layers(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    for stage, unfinished in ((0, False), (1, True)):
        ranks = Ranks(pipeline=Pipeline(stage, 2))
        model: Any = PagedModel(folder, "float32", ranks=ranks)
        assert model.model.model.unfinished is unfinished


def test_attention_knows_the_weights_behind_it(tmp_path: Path) -> None:
    """In the order in which they are read; side by side, those of the MLP come first."""
    model: Any = PagedModel(make_checkpoint("llama", tmp_path), "float32")
    for layer in model.model.model.layers:
        first, second = layer.self_attn.attention.next_weights
        assert first is layer.self_attn.o_proj.weight
        assert second is layer.mlp.gate_up_proj.weight
        first, second = ParallelBlock.products_after(layer)
        assert (first, second) == (layer.mlp.gate_up_proj, layer.self_attn.o_proj)
