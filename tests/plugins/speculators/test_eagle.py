"""EAGLE and EAGLE-3 heads: the served model's tokens, from the drafts of a reference in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from draft_heads import LLAMA, Random, Tensors, all_states, attention, drafts_of, mlp, rms, write
from drafted import check_drafts, config_of, requests, serve
from rank_executor import Plugin as Ranks

from jackfield.core.errors import ConfigError, JackfieldError
from jackfield.core.registry import Provenance, load_plugins
from jackfield.plugins.conformance import rank_threads

from helpers import COMMON, VOCAB, make_checkpoint, reference_model

SIZE = COMMON["hidden_size"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("target"))


# ---------------------------------------------------------------- EAGLE


@pytest.mark.parametrize("biased", [False, True])
async def test_eagle_goes_on_from_the_last_hidden_states(
    biased: bool, target: Path, tmp_path: Path
) -> None:
    draw = Random(1)
    tensors = {"fc.weight": draw.matrix(SIZE, 2 * SIZE), **draw.layer("layers.0.", SIZE)}
    if biased:
        tensors["fc.bias"] = draw.norm(SIZE)
        for name in "qkv":
            weight = tensors[f"layers.0.self_attn.{name}_proj.weight"]
            tensors[f"layers.0.self_attn.{name}_proj.bias"] = draw.norm(len(weight))
    config = {**LLAMA, "hidden_size": SIZE, "architectures": ["EagleLlamaForCausalLM"]}
    head = write(tmp_path / "head", tensors, config)
    model = reference_model(target)
    target_states = all_states(model)
    embed, lm_head = (f().weight for f in (model.get_input_embeddings, model.get_output_embeddings))

    def run(following: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.cat((embed[following], states), -1) @ tensors["fc.weight"].T
        x = x + tensors.get("fc.bias", 0)
        x = x + attention(tensors, "layers.0.", x)
        x = x + mlp(
            tensors, "layers.0.", rms(x, tensors["layers.0.post_attention_layernorm.weight"])
        )
        return x, x @ lm_head.T

    def reference(known: list[int], count: int) -> list[int]:
        return drafts_of(target_states, known, count, lambda states: states[-1], run)

    speculative = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}
    await check_drafts(target, speculative, reference)


# ---------------------------------------------------------------- EAGLE-3


def eagle3(
    draw: Random,
    drafted: int | None,
    *,
    prefix: str,
    own_embeddings: bool = False,
    size: int = SIZE,
) -> tuple[Tensors, dict[str, Any]]:
    """Weights and config.json; drafted: size of the draft vocabulary, None: the target's."""
    tensors = {
        "fc.weight": draw.matrix(size, 3 * SIZE),
        "norm.weight": draw.norm(size),
        "lm_head.weight": draw.matrix(drafted or VOCAB, size),
        f"{prefix}hidden_norm.weight": draw.norm(size),
        f"{prefix}input_layernorm.weight": draw.norm(size),
        **draw.layer(prefix, size, 2 * size),
    }
    config: dict[str, Any] = {
        **LLAMA, "hidden_size": size, "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": drafted or VOCAB,
    }  # fmt: skip
    if size != SIZE:
        config["target_hidden_size"] = SIZE
    if drafted is not None:
        kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:drafted].sort()[0]
        tensors["d2t"] = kept - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, kept, True)
    if own_embeddings:
        tensors["embed_tokens.weight"] = draw.matrix(VOCAB, size)
    return tensors, config


def reference_of(
    target: Path, tensors: Tensors, prefix: str, taps: tuple[int, ...], **flags: bool
) -> Any:
    model = reference_model(target)
    target_states = all_states(model)
    embed = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)

    def read(states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        parts = [states[tap] for tap in taps]
        if flags.get("fc_norm"):
            parts = [rms(p, tensors[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)]
        x = torch.cat(parts, -1)
        if flags.get("norm_before_fc"):
            x = rms(x, tensors["input_norm.weight"])
        return x @ tensors["fc.weight"].T

    def run(following: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = rms(states, tensors[f"{prefix}hidden_norm.weight"])
        both = torch.cat(
            (rms(embed[following], tensors[f"{prefix}input_layernorm.weight"]), normed), -1
        )
        x = (normed if flags.get("norm_before_residual") else states) + attention(
            tensors, prefix, both
        )
        x = x + mlp(tensors, prefix, rms(x, tensors[f"{prefix}post_attention_layernorm.weight"]))
        normed = rms(x, tensors["norm.weight"])
        logits = normed @ tensors["lm_head.weight"].T
        if "d2t" in tensors:
            token_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
            logits = torch.full((len(x), VOCAB), float("-inf")).index_copy(1, token_ids, logits)
        return normed if flags.get("norm_output") else x, logits

    return lambda known, count: drafts_of(target_states, known, count, read, run)


async def test_eagle3_reads_the_inputs_of_three_layers(target: Path, tmp_path: Path) -> None:
    """As SpecForge writes it: `midlayer`, a draft vocabulary, and the layers' outputs by number."""
    tensors, config = eagle3(Random(2), 80, prefix="midlayer.")
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}
    head = write(tmp_path / "head", tensors, config)
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    reference = reference_of(target, tensors, "midlayer.", (0, 1, 2))
    stats = await check_drafts(target, speculative, reference, asked=requests(8))
    assert stats.prefix_cache_hits > 0


async def test_eagle3_as_speculators_writes_it(target: Path, tmp_path: Path) -> None:
    """Nested sizes, norms before and after, own embeddings of another size, and all tokens."""
    draw, size = Random(4), 48
    tensors, config = eagle3(draw, None, prefix="layers.0.", own_embeddings=True, size=size)
    tensors["input_norm.weight"] = draw.norm(3 * SIZE)
    flags = {"norm_before_fc": True, "norm_output": True}
    nested = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", **flags,
        "draft_vocab_size": VOCAB, "target_hidden_size": SIZE,
        "eagle_aux_hidden_state_layer_ids": [2, 1, 0],
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 2}]},
        "transformer_layer_config": {
            name: value for name, value in config.items() if name != "architectures"
        },
    }  # fmt: skip
    head = write(tmp_path / "head", tensors, nested)
    reference = reference_of(
        target, tensors, "layers.0.", (2, 1, 0), norm_before_residual=True, **flags
    )
    await check_drafts(target, {"method": "eagle3", "model": str(head)}, reference)
    # Nothing but the folder says what it is, and how many drafts it makes.
    config_ = config_of(target, speculative_config={"model": str(head)})
    _, stats = await serve(config_, requests(2))
    assert max(stats.spec_decode_num_accepted_tokens_per_pos) == 1


async def test_eagle3_norms_each_layers_states(target: Path, tmp_path: Path) -> None:
    draw = Random(5)
    tensors, config = eagle3(draw, None, prefix="midlayer.")
    tensors |= {f"fc_norm.{number}.weight": draw.norm(SIZE) for number in range(3)}
    config |= {"fc_norm": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    head = write(tmp_path / "head", tensors, config)
    reference = reference_of(target, tensors, "midlayer.", (0, 1, 2), fc_norm=True)
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    await check_drafts(target, speculative, reference)


@pytest.mark.parametrize(
    ("stages", "taps"),
    [pytest.param(2, (0, 1, 2), marks=pytest.mark.slow), (3, (2, 1, 0))],
)
async def test_stages_send_what_eagle3_reads(
    stages: int, taps: tuple[int, ...], target: Path, tmp_path: Path
) -> None:
    """The inputs of their own layers, and of those before; the drafts are those of one stage."""
    tensors, config = eagle3(Random(5), None, prefix="midlayer.", own_embeddings=True)
    config["eagle_aux_hidden_state_layer_ids"] = list(taps)
    head = write(tmp_path / "head", tensors, config)
    reference = reference_of(target, tensors, "midlayer.", taps)
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    await check_drafts(target, speculative, reference, stages=stages)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
async def test_a_last_stage_says_what_a_head_lacks(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_threads, "SECONDS", 0.5)  # The first stage waits for the last one.
    sizes = transformers.LlamaConfig(**{**COMMON, "tie_word_embeddings": False})
    transformers.LlamaForCausalLM(sizes).save_pretrained(target := tmp_path / "target")
    tensors, config = eagle3(Random(2), 80, prefix="midlayer.", own_embeddings=False)
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    if method == "eagle":
        draw = Random(1)
        tensors = {"fc.weight": draw.matrix(SIZE, 2 * SIZE), **draw.layer("layers.0.", SIZE)}
        config = {**LLAMA, "hidden_size": SIZE, "architectures": ["EagleLlamaForCausalLM"]}
    head = write(tmp_path / "head", tensors, config)
    plugins = load_plugins()
    plugins.add_plugin(Ranks(), Provenance("tests", "0", "rank_threads"))
    speculative = {"method": method, "model": str(head), "num_speculative_tokens": 2}
    options: dict[str, Any] = {"executor": "rank_threads", "pipeline_parallel_size": 2}
    with pytest.raises(JackfieldError, match="last stage has no embeddings"):
        await serve(config_of(target, speculative_config=speculative, **options), [], plugins)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vocab_size": 90}, "trained for a vocabulary of 90"),
        ({"target_hidden_size": 32}, "states of 32 numbers"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, r"inputs of layers \[9\]"),
        ({"without": "d2t"}, "no d2t"),
        ({"without": "fc.weight"}, "missing tensors: fc.weight"),
        ({"without": "norm.weight"}, "missing tensors: norm.weight"),
        ({"far": True}, "outside of the vocabulary"),
    ],
)
async def test_a_head_that_does_not_fit_is_refused(
    change: dict[str, Any], reason: str, target: Path, tmp_path: Path
) -> None:
    tensors, config = eagle3(Random(2), 80, prefix="midlayer.")
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    tensors.pop(change.pop("without", ""), None)
    if change.pop("far", False):
        tensors["d2t"] += VOCAB
    head = write(tmp_path / "head", tensors, {**config, **change})
    speculative = {"model": str(head), "num_speculative_tokens": 2}
    with pytest.raises(JackfieldError, match=reason) as error:
        await serve(config_of(target, speculative_config=speculative), requests(1))
    assert isinstance(error.value, ConfigError) or error.value.param == "speculative_config"
