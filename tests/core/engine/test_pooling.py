"""Pooling through the whole engine: the vectors of `transformers`, and requests that go wrong."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from encoders import (
    FAMILIES,
    as_sentence_transformer,
    minilm,
    reference_logits,
    reference_states,
    save_decoder,
    save_encoder,
)
from safetensors.torch import load_file, save_file
from torch import nn

from jackfield import AsyncEngine, EngineConfig, SamplingParams, hookimpl
from jackfield.core.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    LoadError,
    RequestFailed,
)
from jackfield.core.loading.model_config import ModelConfig
from jackfield.core.loading.sentence_transformer import read_sentence_transformer
from jackfield.core.loading.weight_map import WeightMap
from jackfield.core.nn.context import BuildContext, ForwardContext
from jackfield.core.nn.embedding import Embedding
from jackfield.core.outputs import PoolingRequestOutput
from jackfield.core.pooling_params import PoolingParams
from jackfield.core.registry import load_plugins

from helpers import at_once, edit_json

LENGTHS = (1, 2, 3, 17, 40, 41, 5, 64, 1, 90)
DECODERS = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Glm4", "Olmo2", "Olmo3", "Phi3",
)  # fmt: skip


def prompts(lengths: Sequence[int] = LENGTHS, vocab: int = 60) -> list[list[int]]:
    """Random ids, none of them special or padding."""
    rng = random.Random(5)
    return [[rng.randrange(4, vocab) for _ in range(length)] for length in lengths]


def config(folder: Path, **options: Any) -> EngineConfig:
    """`attention_backend` belongs to decoders: pass it there."""
    return EngineConfig(
        **{"model": str(folder), "dtype": "float32", "device": "cpu", "max_num_seqs": 8, **options}
    )


def decoding(folder: Path, **options: Any) -> EngineConfig:
    """Small budgets, so that prompts come in many chunks."""
    return config(
        folder,
        **{
            "runner": "pooling",
            "attention_backend": "torch",
            "max_num_batched_tokens": 24,
            "num_gpu_blocks_override": 60,
            "max_model_len": 200,
            **options,
        },
    )


async def encode_all(
    engine: AsyncEngine, inputs: Sequence[Any], params: PoolingParams | None = None
) -> list[PoolingRequestOutput]:
    async def run_one(prompt: Any) -> PoolingRequestOutput:
        return await engine.encode(prompt, params)

    return await asyncio.gather(*(run_one(prompt) for prompt in inputs))


def close(actual: Any, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(actual, expected.numpy(), atol=tolerance, rtol=tolerance)


def settled(engine: AsyncEngine) -> None:
    """Nothing is left of any request."""
    engine.core.scheduler.check_invariants()
    assert not engine.core.requests.states and not engine.core.outputs._owners
    assert engine.stats().num_requests_running == engine.stats().kv_blocks_used == 0


# ---------------------------------------------------------------- the same vectors


@pytest.mark.parametrize("family", FAMILIES)
async def test_encoders_give_the_vectors_of_transformers(family: str, tmp_path: Path) -> None:
    """Rows of ragged lengths in one batch; the first state, the mean, and every token's."""
    folder = save_encoder(tmp_path, family)
    states = [reference_states(folder, prompt) for prompt in prompts()]
    async with AsyncEngine(config(folder)) as engine:
        assert engine.supported_tasks == ("embed", "token_embed")
        raw = PoolingParams(normalize=False)
        for output, expected in zip(await encode_all(engine, prompts(), raw), states, strict=True):
            close(output.outputs.data, expected[0])
        for output, expected in zip(await encode_all(engine, prompts()), states, strict=True):
            close(output.outputs.data, F.normalize(expected[0], dim=0))
        each = PoolingParams(task="token_embed", normalize=False)
        for output, expected in zip(await encode_all(engine, prompts(), each), states, strict=True):
            close(output.outputs.data, expected)
        settled(engine)
    async with AsyncEngine(config(folder, pooler_config={"pooling_type": "MEAN"})) as engine:
        for output, expected in zip(await encode_all(engine, prompts(), raw), states, strict=True):
            close(output.outputs.data, expected.mean(0))


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
async def test_classifiers_give_the_logits_of_transformers(
    family: str, num_labels: int, tmp_path: Path
) -> None:
    folder = save_encoder(tmp_path, family, "ForSequenceClassification", num_labels=num_labels)
    logits = [reference_logits(folder, prompt) for prompt in prompts()]
    async with AsyncEngine(config(folder)) as engine:
        assert engine.supported_tasks == (
            ("classify", "score") if num_labels == 1 else ("classify",)
        )
        raw = await encode_all(engine, prompts(), PoolingParams(activation=False))
        outputs = await encode_all(engine, prompts())
    for output, logit, expected in zip(outputs, raw, logits, strict=True):
        close(logit.outputs.data, expected)
        close(output.outputs.probs, expected.sigmoid() if num_labels == 1 else expected.softmax(0))


@pytest.mark.parametrize("family", FAMILIES)
async def test_encoders_classify_tokens_as_transformers_does(family: str, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, family, "ForTokenClassification", num_labels=3)
    model = getattr(transformers, f"{family}ForTokenClassification").from_pretrained(folder).eval()
    async with AsyncEngine(config(folder)) as engine:
        assert engine.supported_tasks == ("token_classify",)
        outputs = await encode_all(engine, prompts())
        raw = await encode_all(engine, prompts(), PoolingParams(activation=False))
        with pytest.raises(InvalidRequest, match="'classify' is not what this model does"):
            await engine.encode("x", PoolingParams(task="classify"))
    for prompt, output, logits in zip(prompts(), outputs, raw, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0]
        close(logits.outputs.data, expected)
        close(output.outputs.data, expected.softmax(-1))
    for options in ({"task": "classify"}, {"task": "embed"}, {"task": "score"},
                    {"pooler_config": {"pooling_type": "CLS"}}):  # fmt: skip
        with pytest.raises(ConfigError):
            await AsyncEngine(config(folder, **options)).start()


def save_reward(folder: Path, architecture: str, num_labels: int) -> nn.Module:
    """A Qwen2 with two layers after its states, as Qwen's reward models have them."""
    save_decoder(folder, "Qwen2", "ForCausalLM")
    states = transformers.Qwen2Model.from_pretrained(folder, dtype=torch.float32).eval()
    size = states.config.hidden_size
    head = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, num_labels))
    tensors = {f"model.{name}": tensor for name, tensor in states.state_dict().items()}
    tensors |= {f"score.{name}": tensor for name, tensor in head.state_dict().items()}
    tensors["lm_head.weight"] = torch.zeros(states.config.vocab_size, size)
    save_file(tensors, folder / "model.safetensors")
    edit_json(folder / "config.json", architectures=[architecture])

    class Rewards(nn.Module):
        @torch.no_grad()
        def forward(self, token_ids: list[int]) -> torch.Tensor:
            return head(states(torch.tensor([token_ids])).last_hidden_state[0])

    return Rewards()


async def test_each_token_has_a_reward_over_chunks(tmp_path: Path) -> None:
    model = save_reward(tmp_path, "Qwen2ForRewardModel", 1)
    inputs = prompts((1, 5, 24, 25, 70, 150), vocab=199)
    async with AsyncEngine(decoding(tmp_path, task="reward")) as engine:
        assert engine.supported_tasks == ("token_classify",)
        for _ in range(2):  # The second time with its prefix in the cache, which is not read.
            outputs = await encode_all(engine, inputs)
            for prompt, output in zip(inputs, outputs, strict=True):
                assert output.outputs.data.shape == (len(prompt), 1)
                close(output.outputs.data, model(prompt), 1e-4)
        sigmoid = await engine.encode(inputs[1], PoolingParams(activation=True))
        close(sigmoid.outputs.data, model(inputs[1]).sigmoid(), 1e-4)
        settled(engine)


async def test_each_step_has_its_probabilities(tmp_path: Path) -> None:
    model = save_reward(tmp_path, "Qwen2ForProcessRewardModel", 2)
    inputs = [[7, 8, 9, 6, 6, 9], [9] * 40, [5, 6], [7, 8, 9, 10] * 20]
    async with AsyncEngine(decoding(tmp_path)) as engine:
        for prompt, output in zip(inputs, await encode_all(engine, inputs), strict=True):
            close(output.outputs.data, model(prompt).softmax(-1), 1e-4)
    steps = {"pooling_type": "STEP", "step_tag_id": 9}
    async with AsyncEngine(decoding(tmp_path, pooler_config=steps)) as engine:
        for prompt, output in zip(inputs, await encode_all(engine, inputs), strict=True):
            places = [place for place, token in enumerate(prompt) if token == 9]
            assert output.outputs.data.shape == (len(places), 2)
            close(output.outputs.data, model(prompt).softmax(-1)[places], 1e-4)
    one = {**steps, "returned_token_ids": [1]}
    async with AsyncEngine(decoding(tmp_path, pooler_config=one)) as engine:
        output = await engine.encode(inputs[0], PoolingParams(activation=False))
        close(output.outputs.data, model(inputs[0])[[2, 5]][:, 1:], 1e-4)
    for wrong in ({"pooling_type": "ALL", "step_tag_id": 9}, {**steps, "returned_token_ids": [2]},
                  {**steps, "pooling_type": "LAST"}):  # fmt: skip
        with pytest.raises(ConfigError, match="pooler_config: ") as refused:
            await AsyncEngine(decoding(tmp_path, pooler_config=wrong)).start()
        assert refused.value.param == "pooler_config"


async def test_internlm2_rewards_by_its_own_head(tmp_path: Path) -> None:
    """Its weights by its names, of a Llama whose queries are as many as its keys."""
    save_decoder(tmp_path, "Llama", "ForCausalLM", num_key_value_heads=4)
    states = transformers.LlamaModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    cfg = states.config
    names = {
        "embed_tokens": "tok_embeddings", "self_attn.o_proj": "attention.wo",
        "mlp.": "feed_forward.", "down_proj": "w2", "gate_proj": "w1", "up_proj": "w3",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    tensors = {}
    for name, tensor in states.state_dict().items():
        if not any(part in name for part in ("q_proj", "k_proj", "v_proj")):
            for own, theirs in names.items():
                name = name.replace(own, theirs)
            tensors[f"model.{name}"] = tensor
    for layer in range(cfg.num_hidden_layers):
        parts = [
            getattr(states.layers[layer].self_attn, kind).weight.view(4, -1, cfg.hidden_size)
            for kind in ("q_proj", "k_proj", "v_proj")
        ]
        joined = torch.stack(parts, 1).reshape(-1, cfg.hidden_size)
        tensors[f"model.layers.{layer}.attention.wqkv.weight"] = joined
    head = nn.Linear(cfg.hidden_size, 1, bias=False)
    tensors["v_head.weight"] = head.weight
    save_file({n: t.detach().contiguous() for n, t in tensors.items()},
              tmp_path / "model.safetensors")  # fmt: skip
    edit_json(tmp_path / "config.json", architectures=["InternLM2ForRewardModel"],
              model_type="internlm2", bias=False)  # fmt: skip
    inputs = prompts((1, 5, 30), vocab=199)
    async with AsyncEngine(decoding(tmp_path)) as engine:
        for prompt, output in zip(inputs, await encode_all(engine, inputs), strict=True):
            with torch.no_grad():
                want = head(states(torch.tensor([prompt])).last_hidden_state[0])
            close(output.outputs.data, want, 1e-4)


async def test_vectors_of_all_tokens_by_default(tmp_path: Path) -> None:
    """Of any model that embeds, and of those at a step's end alone."""
    folder = save_encoder(tmp_path, "Bert")
    options = {"pooling_type": "ALL", "use_activation": False}
    async with AsyncEngine(config(folder, pooler_config=options)) as engine:
        assert engine.supported_tasks == ("token_embed", "embed")
        for prompt, output in zip(prompts(), await encode_all(engine, prompts()), strict=True):
            close(output.outputs.data, reference_states(folder, prompt))
    options = {"pooling_type": "STEP", "step_tag_id": 9, "normalize": False}
    async with AsyncEngine(config(folder, pooler_config=options)) as engine:
        prompt = [5, 9, 6, 9]
        output = await engine.encode(prompt)
        close(output.outputs.data, reference_states(folder, prompt)[[1, 3]])


@pytest.mark.parametrize(("family", "fields"), [("Phi", {}), ("GPTJ", {"rotary_dim": 8})])
async def test_a_head_with_a_bias_is_left_out(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_decoder(tmp_path, family, "ForCausalLM", **fields)
    inputs = prompts((1, 5, 30), vocab=199)
    async with AsyncEngine(decoding(folder)) as engine:
        for prompt, output in zip(inputs, await encode_all(engine, inputs), strict=True):
            close(output.outputs.data, F.normalize(reference_states(folder, prompt)[-1], dim=0))


@pytest.mark.parametrize("family", ["NomicBert", "Gte"])
async def test_encoders_are_read_by_transformers_names(family: str, tmp_path: Path) -> None:
    """What it saves has the names that the authors published."""
    folder = save_encoder(tmp_path, family)
    model = getattr(transformers, f"{family}Model").from_pretrained(folder, dtype=torch.float32)
    states = [reference_states(folder, prompt) for prompt in prompts()]
    published = load_file(folder / "model.safetensors")
    named = {f"{model.base_model_prefix}.{n}": t.clone() for n, t in model.state_dict().items()}
    assert not named.keys() & published.keys()
    save_file(named, folder / "model.safetensors")
    async with AsyncEngine(config(folder)) as engine:
        raw = PoolingParams(normalize=False)
        for output, expected in zip(await encode_all(engine, prompts(), raw), states, strict=True):
            close(output.outputs.data, expected[0])


async def test_modernbert_is_classified_by_the_mean_where_it_says_so(tmp_path: Path) -> None:
    folder = save_encoder(
        tmp_path, "ModernBert", "ForSequenceClassification", num_labels=2,
        classifier_pooling="mean",
    )  # fmt: skip
    async with AsyncEngine(config(folder)) as engine:
        raw = await encode_all(engine, prompts(), PoolingParams(activation=False))
    for prompt, output in zip(prompts(), raw, strict=True):
        close(output.outputs.data, reference_logits(folder, prompt))


async def test_bge_m3_gives_vectors_of_texts_and_tokens_and_weights(tmp_path: Path) -> None:
    """By its two layers' own files, as they are published, or among the other weights."""
    folder = save_encoder(tmp_path, "XLMRoberta", bos_token_id=0, eos_token_id=2)
    layers = {"colbert_linear": nn.Linear(32, 32), "sparse_linear": nn.Linear(32, 1)}
    inputs = [[0, *prompt, 2] for prompt in prompts()] + [[5, 6], [0, 2]]
    options = {"hf_overrides": {"architectures": ["BgeM3EmbeddingModel"]}}

    async def check() -> None:
        async with AsyncEngine(config(folder, **options)) as engine:
            assert engine.supported_tasks == ("embed", "token_embed", "token_classify")
            vectors = await encode_all(engine, inputs)
            of_tokens = await encode_all(engine, inputs, PoolingParams(task="token_embed"))
            weights = await encode_all(engine, inputs, PoolingParams(task="token_classify"))
            settled(engine)
        for prompt, vector, tokens, each in zip(inputs, vectors, of_tokens, weights, strict=True):
            states = reference_states(folder, prompt)
            close(vector.outputs.data, F.normalize(states[0], dim=0))
            with torch.no_grad():
                expected = F.normalize(layers["colbert_linear"](states), dim=-1)
                sparse = layers["sparse_linear"](states).relu()
            begin, end = int(prompt[0] == 0), len(prompt) - (prompt[-1] == 2)
            close(tokens.outputs.data, expected[begin:])
            close(each.outputs.data, sparse[begin:end])

    with pytest.raises(LoadError, match=r"colbert_linear\.pt has no weight of shape"):
        await AsyncEngine(config(folder, **options)).start()
    for name, layer in layers.items():
        torch.save(layer.state_dict(), folder / f"{name}.pt")
    await check()
    tensors = load_file(folder / "model.safetensors")
    for name, layer in layers.items():
        (folder / f"{name}.pt").unlink()
        tensors |= {f"{name}.{part}": t.detach() for part, t in layer.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    await check()


async def test_two_texts_are_distinguished_by_their_types(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, "Bert", "ForSequenceClassification", num_labels=1)
    async with AsyncEngine(config(folder)) as engine:
        pair = {"text": "who is it", "text_pair": "the cat sat on the mat"}
        output, alone = await encode_all(engine, [pair, "who is it"])
        ids = output.prompt_token_ids
        assert ids[0] == 2 and ids.count(3) == 2, "[CLS] … [SEP] … [SEP]"
        types = [0] * (ids.index(3) + 1) + [1] * (len(ids) - ids.index(3) - 1)
        close(output.outputs.data, reference_logits(folder, ids, types).sigmoid())
        assert abs(output.outputs.score - float(reference_logits(folder, ids).sigmoid())) > 1e-4
        close(alone.outputs.data, reference_logits(folder, alone.prompt_token_ids).sigmoid())
        cut = await engine.encode(pair, PoolingParams(truncate_prompt_tokens=7))
        assert cut.prompt_token_ids == [*ids[:3], 3, *ids[5:7], 3]


async def test_types_that_the_model_has_no_table_for_are_left_out(tmp_path: Path) -> None:
    """The word tokenizer numbers the second text 1; RoBERTa has one type alone."""
    folder = save_encoder(tmp_path, "Roberta", "ForSequenceClassification", num_labels=1)
    async with AsyncEngine(config(folder)) as engine:
        output = await engine.encode({"text": "who", "text_pair": "the cat"})
        close(output.outputs.data, reference_logits(folder, output.prompt_token_ids).sigmoid())
    folder = save_encoder(tmp_path, "Bert", "ForSequenceClassification", num_labels=1)
    edit_json(folder / "tokenizer_config.json", model_input_names=["input_ids"])
    async with AsyncEngine(config(folder)) as engine:
        output = await engine.encode({"text": "who", "text_pair": "the cat"})
        close(output.outputs.data, reference_logits(folder, output.prompt_token_ids).sigmoid())


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *(("ForCausalLM", family) for family in DECODERS),
        ("Model", DECODERS[0]),
        *(pytest.param("Model", family, marks=pytest.mark.slow) for family in DECODERS[1:]),
    ],
)
async def test_decoders_are_pooled_over_chunks(family: str, kind: str, tmp_path: Path) -> None:
    """Prompts of many chunks; the second round finds what the first left in the cache."""
    folder = save_decoder(tmp_path, family, kind)
    inputs = prompts((1, 5, 24, 25, 70, 150), vocab=199)
    states = [reference_states(folder, prompt) for prompt in inputs]
    async with AsyncEngine(decoding(folder)) as engine:
        for expect_cached in (False, True):
            outputs = await encode_all(engine, inputs)
            for output, expected in zip(outputs, states, strict=True):
                close(output.outputs.data, F.normalize(expected[-1], dim=0))
            assert (outputs[-1].num_cached_tokens > 0) is expect_cached
        each = await encode_all(engine, inputs, PoolingParams(task="token_embed", normalize=False))
        for output, expected in zip(each, states, strict=True):
            assert output.num_cached_tokens == 0
            close(output.outputs.data, expected, 1e-4)
        settled(engine)


@pytest.mark.parametrize("mode", ["MEAN", "CLS"])
async def test_a_mean_over_chunks_survives_preemption(mode: str, tmp_path: Path) -> None:
    """Blocks run out, so requests lose what they had summed up and begin again."""
    folder = save_decoder(tmp_path, "Qwen3", "ForCausalLM")
    inputs = prompts((120, 130, 110, 33, 140, 90, 2), vocab=199)
    states = [reference_states(folder, prompt) for prompt in inputs]
    options = {
        "pooler_config": {"pooling_type": mode, "normalize": False},
        "num_gpu_blocks_override": 16,
        "long_prefill_token_threshold": 8,
    }
    async with AsyncEngine(decoding(folder, **options)) as engine:
        for _ in range(2):
            outputs = await at_once(engine, *(encode_all(engine, [each]) for each in inputs))
            for [output], expected in zip(outputs, states, strict=True):
                close(output.outputs.data, expected.mean(0) if mode == "MEAN" else expected[0])
                assert output.num_cached_tokens == 0
        assert engine.stats().num_preemptions > 0
        settled(engine)


@pytest.mark.parametrize("family", DECODERS)
async def test_decoders_with_a_classifier(family: str, tmp_path: Path) -> None:
    folder = save_decoder(tmp_path, family, "ForSequenceClassification", num_labels=3)
    inputs = prompts((1, 30, 80), vocab=199)
    async with AsyncEngine(decoding(folder)) as engine:
        outputs = await encode_all(engine, inputs)
    for output, prompt in zip(outputs, inputs, strict=True):
        close(output.outputs.data, reference_logits(folder, prompt).softmax(0))


@pytest.mark.parametrize("tied", [False, True])
async def test_a_language_model_as_reranker(tied: bool, tmp_path: Path) -> None:
    """The sigmoid of the one score is the softmax over the answers no and yes."""
    folder = save_decoder(tmp_path, "Qwen3", "ForCausalLM", tie_word_embeddings=tied)
    edit_json(folder / "tokenizer_config.json", unk_token="[UNK]")
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["cat", "dog"],
        "is_original_qwen3_reranker": True,
    }
    [prompt] = prompts((40,), vocab=199)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    both = logits[[vocab["cat"], vocab["dog"]]]
    async with AsyncEngine(decoding(folder, hf_overrides=overrides)) as engine:
        assert engine.supported_tasks == ("classify", "score")
        output = await engine.encode(prompt)
        close(output.outputs.data, both.softmax(0)[1:], 1e-5)
        joined = await engine.encode({"text": "who is it ", "text_pair": "the cat"})
        assert (
            joined.prompt_token_ids == (await engine.encode("who is it the cat")).prompt_token_ids
        )
    each = {**overrides, "is_original_qwen3_reranker": False, "method": "no_post_processing"}
    async with AsyncEngine(decoding(folder, hf_overrides=each)) as engine:
        output = await engine.encode(prompt, PoolingParams(activation=False))
        close(output.outputs.data, both)
        assert engine.model_config.pooling is not None
        assert engine.model_config.pooling.labels == ("cat", "dog")
    for changes, match in (
        ({"classifier_from_token": ["cat", "Dog"]}, "'Dog' of classifier_from_token is not one"),
        ({"classifier_from_token": ["cat", "a dog"]}, "'a dog' of"),
        ({"classifier_from_token": ["cat"]}, "needs two"),
        ({"classifier_from_token": "cat"}, "no list of tokens"),
        ({"method": "average"}, "the method 'average'"),
    ):
        with pytest.raises(ConfigError, match=match):
            await AsyncEngine(decoding(folder, hf_overrides={**overrides, **changes})).start()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Phi", {}),
        ("GPTJ", {"n_head": 4, "rotary_dim": 8}),
        ("CodeGen", {"n_head": 4, "rotary_dim": 8}),
        ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "lm_head_bias": True}),
        ("Qwen3", {}),
    ],
)
async def test_a_head_is_left_out(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Its weight, and its bias; tied or not, and of whatever values."""
    folder = save_decoder(tmp_path, family, "ForCausalLM", **changes)
    [prompt] = prompts((40,), vocab=199)
    expected = reference_states(folder, prompt)[-1]
    for tied in (False, True):
        edit_json(folder / "config.json", tie_word_embeddings=tied)
        async with AsyncEngine(decoding(folder)) as engine:
            output = await engine.encode(prompt, PoolingParams(normalize=False))
        close(output.outputs.data, expected)


async def test_names_that_leave_out_the_models_prefix(tmp_path: Path) -> None:
    """As published embedding models have them: a causal architecture, headless names."""
    folder = save_decoder(tmp_path, "Qwen3", "ForCausalLM")
    [expected] = [reference_states(folder, prompt) for prompt in prompts((30,))]
    file = folder / "model.safetensors"
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(file).items()
        if name != "lm_head.weight"
    }
    save_file(tensors, file, metadata={"format": "pt"})
    as_sentence_transformer(folder, mode="lasttoken", normalize=False)
    async with AsyncEngine(decoding(folder, runner="auto")) as engine:
        assert engine.supported_tasks == ("embed", "token_embed"), "by its modules.json"
        [output] = await encode_all(engine, prompts((30,)))
        close(output.outputs.data, expected[-1])


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_masked_models_encoder_is_pooled(family: str, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, family, "ForMaskedLM")
    async with AsyncEngine(config(folder, pooler_config={"normalize": False})) as engine:
        output = await engine.encode([4, 5, 6])
        close(output.outputs.data, reference_states(folder, [4, 5, 6])[0])


async def test_decoders_compare_texts_as_one_where_they_were_trained_so(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path, "Qwen2", "ForSequenceClassification", num_labels=1)
    pair = {"text": "who is it ", "text_pair": "the cat"}
    async with AsyncEngine(decoding(folder)) as engine:
        apart = await engine.encode(pair)
    async with AsyncEngine(decoding(folder, hf_overrides={"use_pad_token": False})) as engine:
        [joined, item] = await encode_all(engine, [pair, "who is it the cat"])
    assert joined.prompt_token_ids == item.prompt_token_ids != apart.prompt_token_ids


async def test_minilm_gives_the_vectors_of_transformers() -> None:
    folder = minilm()
    texts = [
        "That is a happy person", "x", "Pooling takes the mean over all tokens. " * 12,
        "日本語 and Ünïcode, too?", "two\nlines",
    ]  # fmt: skip
    async with AsyncEngine(config(folder)) as engine:
        assert engine.model_config.max_model_len == 256, "sentence_bert_config.json"
        outputs = await encode_all(engine, texts)
        with pytest.raises(ContextLengthExceeded, match="your prompt has 402 tokens"):
            await engine.encode("word " * 400)
        cut = await engine.encode("word " * 400, PoolingParams(truncate_prompt_tokens=-1))
        assert len(cut.prompt_token_ids) == 256
        assert (cut.prompt_token_ids[0], cut.prompt_token_ids[-1]) == (101, 102)
    for output in outputs:
        states = reference_states(folder, output.prompt_token_ids)
        close(output.outputs.data, F.normalize(states.mean(0), dim=0), 1e-5)
        assert len(output.outputs.embedding) == 384


# ---------------------------------------------------------------- one request at a time


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save_encoder(tmp_path, "Bert")


async def test_not_a_number_ends_one_request_alone(bert: Path) -> None:
    tensors = load_file(bert / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][7] = torch.nan
    save_file(tensors, bert / "model.safetensors", metadata={"format": "pt"})
    good = [[4, 5, 6], [8, 9, 10, 11]]
    async with AsyncEngine(config(bert)) as engine:
        results = await asyncio.gather(
            *(encode_all(engine, [p]) for p in (good[0], [5, 7, 6], good[1])),
            return_exceptions=True,
        )
        assert isinstance(results[1], RequestFailed) and "not a number" in results[1].message
        for result, prompt in ((results[0], good[0]), (results[2], good[1])):
            assert not isinstance(result, BaseException)
            expected = reference_states(bert, prompt)[0]
            close(result[0].outputs.data, F.normalize(expected, dim=0))
        settled(engine)


async def test_abort_and_cancelled_callers_leave_nothing(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path, "Llama", "ForCausalLM")
    async with AsyncEngine(decoding(folder, long_prefill_token_threshold=4)) as engine:
        long, short = prompts((150, 6), vocab=199)
        tasks = [
            asyncio.create_task(engine.encode(long, request_id=f"r{i}").__anext__())
            for i in range(12)
        ]
        beside = asyncio.create_task(encode_all(engine, [short]))
        while not engine.stats().steps:
            await asyncio.sleep(0)
        assert await engine.abort("r0") and not await engine.abort("nobody")
        for task in tasks[1:]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], RequestFailed) and "aborted" in results[0].message
        assert all(isinstance(r, asyncio.CancelledError) for r in results[1:])
        [output] = await beside
        close(output.outputs.data, F.normalize(reference_states(folder, short)[-1], dim=0))
        settled(engine)


async def test_the_wrong_kind_is_refused(tmp_path: Path, bert: Path) -> None:
    async with AsyncEngine(config(bert)) as engine:
        with pytest.raises(InvalidRequest, match=r"gives vectors \(embed, token_embed\)"):
            await anext(engine.generate("the cat", SamplingParams()))
        with pytest.raises(InvalidRequest, match="gives vectors"):
            await anext(engine.chat([{"role": "user", "content": "the cat"}]))
    async with AsyncEngine(EngineConfig(dtype="float32", num_gpu_blocks_override=40)) as engine:
        assert engine.supported_tasks == ("generate",)
        with pytest.raises(InvalidRequest, match="--runner pooling"):
            await engine.encode("Once")


async def test_requests_are_checked_by_the_fields_name(bert: Path) -> None:
    async with AsyncEngine(config(bert, max_model_len=20)) as engine:
        for prompt, params, match, param in [
            ([4, 999], None, "token id 999", "prompt"),
            ([], None, "at least one token", "prompt"),
            ({"text": "a"}, None, "text and text_pair", "prompt"),
            ([True], None, "list of token ids", "prompt"),
            ("the " * 30, None, "20 tokens. However, your prompt has 32 tokens", "prompt"),
            ("the", {"truncate_prompt_tokens": 21}, "more than", "truncate_prompt_tokens"),
            ("the", {"truncate_prompt_tokens": 2}, "no room", "truncate_prompt_tokens"),
            ("the", {"task": "classify"}, "not what this model does", "task"),
            ("the", {"dimensions": 8}, "cannot be cut", "dimensions"),
            ("the", {"activation": True}, "no meaning", "activation"),
        ]:
            with pytest.raises(InvalidRequest, match=match) as caught:
                await engine.encode(prompt, PoolingParams(**(params or {})))  # type: ignore
            assert caught.value.param == param
        whole = await engine.encode([5] * 20)
        assert len(whole.prompt_token_ids) == 20, "a prompt may fill the context"
        cut = await engine.encode(list(range(4, 40)), PoolingParams(truncate_prompt_tokens=6))
        assert cut.prompt_token_ids == [4, 5, 6, 7, 8, 9]
        settled(engine)


@pytest.mark.parametrize(
    "wrong",
    [{"task": "pool"}, {"normalize": 1}, {"dimensions": 0}, {"dimensions": True},
     {"truncate_prompt_tokens": -2}, {"truncate_prompt_tokens": 0}, {"activation": "tanh"}],
)  # fmt: skip
def test_params_refuse_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        PoolingParams(**wrong)
    assert caught.value.param == next(iter(wrong))


async def test_matryoshka_vectors_are_cut_and_scaled(bert: Path) -> None:
    edit_json(bert / "config.json", matryoshka_dimensions=[8, 16])
    states = reference_states(bert, [4, 5, 6])[0]
    async with AsyncEngine(config(bert)) as engine:
        output = await engine.encode([4, 5, 6], PoolingParams(dimensions=8))
        close(output.outputs.data, F.normalize(states[:8], dim=0))
        with pytest.raises(InvalidRequest, match=r"9 is not one of this model's \(8, 16\)"):
            await engine.encode([4, 5, 6], PoolingParams(dimensions=9))
    with pytest.raises(ConfigError, match="no list of integers"):
        await AsyncEngine(config(bert, hf_overrides={"matryoshka_dimensions": ["x"]})).start()
    any_size = {"is_matryoshka": True, "matryoshka_dimensions": None}
    async with AsyncEngine(config(bert, hf_overrides=any_size)) as engine:
        output = await engine.encode([4, 5], PoolingParams(dimensions=5, normalize=False))
        close(output.outputs.data, reference_states(bert, [4, 5])[0][:5])


async def test_more_prompts_than_a_step_takes(bert: Path) -> None:
    """The token budget bounds the batch; a prompt it cannot hold is refused by name."""
    inputs = prompts([30] * 30)
    async with AsyncEngine(config(bert, max_num_batched_tokens=64, max_num_seqs=64)) as engine:
        outputs = await encode_all(engine, inputs)
        expected = F.normalize(reference_states(bert, inputs[-1])[0], dim=0)
        close(outputs[-1].outputs.data, expected)
        assert engine.stats().steps >= 15
        with pytest.raises(InvalidRequest, match="max_num_batched_tokens"):
            await engine.encode([5] * 65)
        settled(engine)


async def test_the_default_budget_takes_the_longest_prompt(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, "Bert", max_position_embeddings=2100, num_hidden_layers=1)
    async with AsyncEngine(config(folder)) as engine:
        assert engine.config.max_num_batched_tokens == 2100
        output = await engine.encode([5, 6] * 1050)
        expected = F.normalize(reference_states(folder, [5, 6] * 1050)[0], dim=0)
        close(output.outputs.data, expected)


async def test_listeners_and_metrics_see_pooling_requests(bert: Path) -> None:
    seen: list[Any] = []

    class Listener:
        @hookimpl
        def request_finished(self, output: Any) -> None:
            seen.append(output)

    plugins = load_plugins(extra=[Listener()])
    async with AsyncEngine(config(bert), plugins=plugins) as engine:
        output = await engine.encode("the cat")
        async for again in engine.encode("the cat", request_id="mine"):
            assert again.request_id == "mine" and again.finished
        await asyncio.sleep(0)
        text = (await engine.render_metrics()).decode()
        assert 'request_success_total{finished_reason="stop"' in text
        assert engine.stats().prompt_tokens == 2 * len(output.prompt_token_ids)
    assert [type(item) for item in seen] == [PoolingRequestOutput] * 2


class WordVectors(nn.Module):
    """Somebody else's model, with the least that the contract asks for."""

    causal = False
    weight_map = WeightMap(prefixes={"embeddings.word_embeddings.": "words."}, ignored=("",))

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        self.words = Embedding(config.vocab_size, config.hidden_size, build)

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        assert context.backend is None
        return self.words(input_ids)

    def pooling_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


async def test_a_plugins_model_is_pooled(bert: Path) -> None:
    class Plugin:
        jackfield_api = 3

        @hookimpl
        def register_models(self, registry: Any) -> None:
            registry.add("WordVectors", WordVectors)

    overrides = {"architectures": ["WordVectors"]}
    options = {"hf_overrides": overrides, "pooler_config": {"normalize": False}}
    table = load_file(bert / "model.safetensors")["embeddings.word_embeddings.weight"]
    async with AsyncEngine(
        config(bert, **options), plugins=load_plugins(extra=[Plugin()])
    ) as engine:
        for prompt in ([4, 5, 6], [9]):
            output = await engine.encode(prompt)
            close(output.outputs.data, table[prompt[-1]])
    with pytest.raises(ConfigError, match="does not generate text"):
        await AsyncEngine(
            config(bert, runner="generate", **options), plugins=load_plugins(extra=[Plugin()])
        ).start()


async def test_a_step_that_fails_ends_its_requests_and_no_others(bert: Path) -> None:
    class Raises(WordVectors):
        def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
            if (input_ids == 13).any():
                raise RuntimeError("no luck")
            return super().forward(input_ids, context)

    class Plugin:
        jackfield_api = 3

        @hookimpl
        def register_models(self, registry: Any) -> None:
            registry.add("Raises", Raises)

    options = {"hf_overrides": {"architectures": ["Raises"]}}
    engine = AsyncEngine(config(bert, **options), plugins=load_plugins(extra=[Plugin()]))
    async with engine:
        await engine.encode([4])
        right = (await engine.encode([4])).outputs.data
        for _ in range(4):
            with pytest.raises(RequestFailed, match="no luck"):
                await engine.encode([13])
            assert ((await engine.encode([4])).outputs.data == right).all()
        assert engine.healthy
        with pytest.raises(RequestFailed, match="no luck"):
            await asyncio.gather(*(engine.encode([token]) for token in (4, 5, 13)))
        assert ((await engine.encode([4])).outputs.data == right).all()


# ---------------------------------------------------------------- what the checkpoint says


async def test_sentence_transformers_files_are_honoured(bert: Path) -> None:
    as_sentence_transformer(bert, normalize=False, length=12)
    states = reference_states(bert, [4, 5, 6])
    async with AsyncEngine(config(bert)) as engine:
        assert engine.model_config.max_model_len == 12
        output = await engine.encode([4, 5, 6])
        close(output.outputs.data, states.mean(0))
    assert AsyncEngine(config(bert)).config.max_model_len is None
    async with AsyncEngine(config(bert, max_model_len=130)) as engine:
        await engine.encode([5] * 130)


def add_dense(folder: Path, number: int, size: tuple[int, int], activation: str) -> torch.Tensor:
    """A Dense module behind the others; its weight [out, in], with a bias of 0.25 if odd."""
    path = folder / f"{number}_Dense"
    path.mkdir()
    weight = torch.randn(size[1], size[0], generator=torch.Generator().manual_seed(number))
    tensors = {"linear.weight": weight}
    if number % 2:
        tensors["linear.bias"] = torch.full((size[1],), 0.25)
    save_file(tensors, path / "model.safetensors")
    settings = {"in_features": size[0], "out_features": size[1], "bias": bool(number % 2)}
    settings["activation_function"] = f"torch.nn.modules.{activation}"  # type: ignore[assignment]
    (path / "config.json").write_text(json.dumps(settings))
    listed = json.loads((folder / "modules.json").read_text())
    listed.insert(-1, {"type": "sentence_transformers.models.Dense", "path": path.name})
    (folder / "modules.json").write_text(json.dumps(listed))
    return weight


async def test_dense_modules_of_sentence_transformers(bert: Path) -> None:
    as_sentence_transformer(bert)
    edit_json(bert / "config.json", is_matryoshka=True)
    first = add_dense(bert, 3, (32, 12), "activation.Tanh")
    second = add_dense(bert, 4, (12, 40), "linear.Identity")
    states = reference_states(bert, [4, 5, 6])
    expected = second @ torch.tanh(first @ states.mean(0) + 0.25)
    async with AsyncEngine(config(bert)) as engine:
        output = await engine.encode([4, 5, 6])
        close(output.outputs.data, F.normalize(expected, dim=0))
        cut = await engine.encode([4, 5, 6], PoolingParams(dimensions=35, normalize=False))
        close(cut.outputs.data, expected[:35])
    edit_json(bert / "4_Dense" / "config.json", out_features=41)
    with pytest.raises(LoadError, match=r"model\.safetensors holds"):
        await AsyncEngine(config(bert)).start()
    for changes, match in (
        ({"in_features": 13}, "takes 13 numbers, there are 12"),
        ({"activation_function": "os.system"}, "names the activation 'os.system'"),
        ({"out_features": None}, "no in_features and out_features"),
    ):
        edit_json(bert / "4_Dense" / "config.json", **changes)
        with pytest.raises(ConfigError, match=match):
            await AsyncEngine(config(bert)).start()


def test_sentence_transformers_modes(bert: Path) -> None:
    assert read_sentence_transformer(bert).pooling_type is None
    for mode, kind in (("cls_token", "CLS"), ("mean_tokens", "MEAN"), ("lasttoken", "LAST")):
        actual = read_sentence_transformer(as_sentence_transformer(bert, mode=mode))
        assert (actual.pooling_type, actual.normalize, actual.max_length) == (kind, True, None)
    (bert / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    assert read_sentence_transformer(bert).pooling_type == "LAST"


def test_sentence_transformers_that_would_be_wrong_are_refused(bert: Path) -> None:
    with pytest.raises(ConfigError, match="pools by max_tokens"):
        read_sentence_transformer(as_sentence_transformer(bert, mode="max_tokens"))
    edit_json(bert / "1_Pooling" / "config.json", pooling_mode_mean_tokens=True)
    with pytest.raises(ConfigError, match="pools by max_tokens, mean_tokens"):
        read_sentence_transformer(bert)
    listed = json.loads((bert / "modules.json").read_text())
    (bert / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    for kind in ("LSTM", "Dense"):  # The second one behind Normalize.
        module = {"type": f"x.{kind}", "path": "3"}
        (bert / "modules.json").write_text(json.dumps([*listed, module]))
        with pytest.raises(ConfigError, match=f"'{kind}', which is not supported there"):
            read_sentence_transformer(bert)
    for broken in ('["Pooling"]', '{"type": "Pooling"}', "{", "[" * 100_000):
        (bert / "modules.json").write_text(broken)
        with pytest.raises(LoadError, match=r"modules\.json"):
            read_sentence_transformer(bert)
    (bert / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": "../../etc"}]))
    with pytest.raises(LoadError, match="not in its own folder"):
        read_sentence_transformer(bert)


async def test_texts_in_lower_case_where_the_checkpoint_says_so(bert: Path) -> None:
    as_sentence_transformer(bert)
    edit_json(bert / "sentence_bert_config.json", do_lower_case=True)
    async with AsyncEngine(config(bert)) as engine:
        upper, lower = await encode_all(engine, ["The CAT", "the cat"])
        assert upper.prompt_token_ids == lower.prompt_token_ids


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"runner": "generate"}, "does not generate text"),
        ({"task": "generate"}, "does not generate text"),
        ({"task": "classify"}, "no classifier"),
        ({"task": "embed", "runner": "generate"}, "needs runner 'pooling'"),
        ({"max_model_len": 131}, "131 is more than this model's 130"),
        ({"attention_backend": "torch"}, "is an encoder"),
        ({"pooler_config": {"pooling_type": "MAX"}}, "pooling_type"),
        ({"pooler_config": {"pool": "MEAN"}}, "unknown field `pool`"),
    ],
)
async def test_options_that_do_not_fit_stop_the_start(
    bert: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        await AsyncEngine(config(bert, **options)).start()
    assert caught.value.param in options


async def test_a_classifiers_task_and_activation(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, "Bert", "ForSequenceClassification", num_labels=2)
    for task, match in (("embed", "this model classifies"), ("score", "2 labels")):
        with pytest.raises(ConfigError, match=match):
            await AsyncEngine(config(folder, task=task)).start()
    logits = reference_logits(folder, [4, 5])
    for changes, expected in (
        ({"problem_type": "multi_label_classification"}, logits.sigmoid()),
        ({"problem_type": "regression"}, logits),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, logits),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}, logits.sigmoid()),
    ):
        async with AsyncEngine(config(folder, hf_overrides=changes)) as engine:
            close((await engine.encode([4, 5])).outputs.data, expected)
    strange = {"sentence_transformers": {"activation_fn": "os.system"}}
    with pytest.raises(ConfigError, match=r"'os\.system', which is not supported"):
        await AsyncEngine(config(folder, hf_overrides=strange)).start()


async def test_a_regression_has_no_activation(tmp_path: Path) -> None:
    """As in transformers' pipeline, with one label, too."""
    folder = save_encoder(
        tmp_path, "Bert", "ForSequenceClassification", num_labels=1, problem_type="regression"
    )
    async with AsyncEngine(config(folder)) as engine:
        close((await engine.encode([4, 5])).outputs.data, reference_logits(folder, [4, 5]))
    own = {"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}
    async with AsyncEngine(config(folder, hf_overrides=own)) as engine:
        close(
            (await engine.encode([4, 5])).outputs.data, reference_logits(folder, [4, 5]).sigmoid()
        )


async def test_roberta_positions_begin_behind_the_padding_id(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, "Roberta")
    async with AsyncEngine(config(folder)) as engine:
        assert engine.model_config.max_model_len == 128
        [output] = await encode_all(engine, [[5] * 128], PoolingParams(normalize=False))
        close(output.outputs.data, reference_states(folder, [5] * 128)[0])
