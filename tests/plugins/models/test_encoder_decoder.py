"""Encoder-decoder models say what `transformers` says, through the whole engine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from aiohttp.test_utils import TestClient, TestServer
from rank_executor import Plugin

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, InvalidRequest
from jackfield.core.registry import load_plugins
from jackfield.core.step import StepPlan
from jackfield.entrypoints.server.app import make_app

from helpers import at_once, edit_json

VOCAB = 131
TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40, "max_position_embeddings": 64, "init_std": 0.3, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
T5: dict[str, Any] = {
    "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "d_kv": 10, "d_ff": 48,
    "relative_attention_num_buckets": 12, "relative_attention_max_distance": 20,
    "initializer_factor": 2.0, "decoder_start_token_id": 1,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": {},
    "BlenderbotForConditionalGeneration": {"encoder_no_repeat_ngram_size": 0},
    "BlenderbotSmallForConditionalGeneration": {"scale_embedding": True},
    "M2M100ForConditionalGeneration": {"forced_bos_token_id": 11, "activation_function": "relu"},
    "MBartForConditionalGeneration": {"scale_embedding": True, "forced_bos_token_id": 7},
    "MarianMTModel": {"activation_function": "swish"},
    "MvpForConditionalGeneration": {"use_prompt": False},
    "PLBartForConditionalGeneration": {},
    "PegasusForConditionalGeneration": {"activation_function": "relu"},
    "MT5ForConditionalGeneration": {**T5, "feed_forward_proj": "gated-gelu"},
    "T5ForConditionalGeneration": {**T5, "feed_forward_proj": "relu"},
    "T5ForConditionalGeneration:flan": {
        **T5,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "UMT5ForConditionalGeneration": {**T5, "feed_forward_proj": "gated-gelu"},
}
SOURCES = [[3 + (5 * i * n) % (VOCAB - 3) for i in range(1, n)] for n in (2, 9, 26, 43)]
OUTPUT = 7


def encoded_by(plan: Any) -> tuple[Any, ...]:
    """The sources that a plan encodes."""
    part = plan.parts.get("encoder_decoder")
    return () if part is None else part.items


def make(case: str, folder: Path) -> Any:
    """Save a random checkpoint, and return the model of `transformers`."""
    model_class = getattr(transformers, case.partition(":")[0])
    torch.manual_seed(11)
    settings = model_class.config_class(**{**TINY, **CASES[case]})
    # In SDPA of transformers 5.17, tokens of UMT5's decoder see later ones.
    settings._attn_implementation = "eager"
    model = model_class(settings).eval()
    if CASES[case].get("tie_word_embeddings") is False:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, TINY["d_model"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(torch.randn(1, VOCAB))
    model.save_pretrained(folder)
    return model


def config(folder: Path, **options: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 3,
        "max_num_batched_tokens": 64, "block_size": 4, "num_gpu_blocks_override": 120, **options,
    }  # fmt: skip
    return EngineConfig(model=str(folder), **settings)


@torch.no_grad()
def scores(model: Any, source: list[int], decoder: list[int]) -> torch.Tensor:
    """→ log-probabilities [len(decoder), vocab_size]"""
    made = model(
        input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([decoder]),
        use_cache=False,
    )  # fmt: skip
    return torch.log_softmax(made.logits[0].float(), -1)


async def answer(engine: AsyncEngine, prompt: Any, **params: Any) -> Any:
    options = {"temperature": 0.0, "max_tokens": OUTPUT, "ignore_eos": True, "logprobs": 1}
    *_, last = [
        output async for output in engine.generate(prompt, SamplingParams(**{**options, **params}))
    ]
    return last


def check(model: Any, source: list[int], output: Any, count: int = OUTPUT) -> None:
    """Each greedy token is the most likely one of the reference, with its log-probability."""
    begin = output.prompt_token_ids
    for completion in output.outputs:
        wanted = scores(model, source, begin + completion.token_ids)[len(begin) - 1 : -1]
        assert len(completion.token_ids) == count
        for row, token, told in zip(wanted, completion.token_ids, completion.logprobs, strict=True):
            assert float(row.max() - row[token]) <= 1e-3
            assert told[token].logprob == pytest.approx(float(row[token]), abs=1e-3)


@pytest.mark.parametrize("case", CASES)
async def test_a_family_equals_transformers(case: str, tmp_path: Path) -> None:
    """Four sources for three slots, and the tokens of `generate`."""
    model = make(case, tmp_path)
    async with AsyncEngine(config(tmp_path)) as engine:
        outputs = await at_once(engine, *(answer(engine, source) for source in SOURCES))
        engine.core.check_idle()
    for source, output in zip(SOURCES, outputs, strict=True):
        check(model, source, output)
        made = model.generate(
            torch.tensor([source]), do_sample=False, num_beams=1, max_new_tokens=OUTPUT + 1,
            eos_token_id=None,
        )  # fmt: skip
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        assert made[0, : len(tokens)].tolist() == tokens


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
async def test_a_family_equals_transformers_on_a_gpu(case: str, tmp_path: Path) -> None:
    """Recorded steps, a slot that is used again, and sources that are found again."""
    model = make(case, tmp_path)
    options: dict[str, Any] = {"device": "cuda", "block_size": 16, "max_num_seqs": 2}
    async with AsyncEngine(config(tmp_path, **options)) as engine:
        outputs = await at_once(engine, *(answer(engine, source) for source in SOURCES))
        outputs += await at_once(engine, *(answer(engine, source) for source in SOURCES))
        engine.core.check_idle()
    for source, output in zip(SOURCES * 2, outputs, strict=True):
        check(model, source, output)


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """→ model of `transformers`, its folder"""
    folder = tmp_path_factory.mktemp("bart")
    return make("BartForConditionalGeneration", folder), folder


def watched(engine: AsyncEngine) -> list[StepPlan]:
    """Return a list that gets all plans of an engine."""
    plans: list[StepPlan] = []
    executor: Any = engine.core.executor
    submit = executor.submit

    def record(plan: StepPlan, *more: Any) -> Any:
        plans.append(plan)
        return submit(plan, *more)

    executor.submit = record
    return plans


def num_encoded(plans: list[StepPlan]) -> int:
    return sum(len(encoded_by(plan)) for plan in plans)


async def test_a_bias_by_distance_goes_with_chunks_and_hits(tmp_path: Path) -> None:
    """Distances beyond the largest bucket, prompts over several steps, a prefix from the cache."""
    case = "UMT5ForConditionalGeneration"
    model = make(case, tmp_path)
    prompt = {"encoder_prompt": SOURCES[3], "decoder_prompt": [5 + n % 90 for n in range(41)]}
    async with AsyncEngine(config(tmp_path, max_num_batched_tokens=16)) as engine:
        outputs = [await answer(engine, prompt) for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 40]
    for output in outputs:
        check(model, SOURCES[3], output)


@pytest.mark.parametrize("case", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
async def test_two_ranks_compute_what_one_does(case: str, tmp_path: Path) -> None:
    """An odd vocabulary: one rank has a row of padding."""
    model = make(case, tmp_path)
    options = {"executor": "rank_threads", "tensor_parallel_size": 2}
    async with AsyncEngine(
        config(tmp_path, **options), plugins=load_plugins(extra=[Plugin()])
    ) as engine:
        outputs = await at_once(engine, *(answer(engine, source) for source in SOURCES))
        workers = engine.core.executor.workers  # type: ignore[union-attr]
        sizes = [sum(p.numel() for p in worker.runner.model.parameters()) for worker in workers]
    for source, output in zip(SOURCES, outputs, strict=True):
        check(model, source, output)
    assert max(sizes) < 0.75 * sum(p.numel() for p in model.parameters())


async def test_quantized_weights_go_with_sources(bart: Any) -> None:
    """The most likely token, within the rounding of weights to 8 bits."""
    model, folder = bart
    async with AsyncEngine(config(folder, quantization="int8")) as engine:
        output = await answer(engine, SOURCES[2])
    begin, tokens = output.prompt_token_ids, output.outputs[0].token_ids
    wanted = scores(model, SOURCES[2], begin + tokens)[len(begin) - 1 : -1]
    assert max(float(r.max() - r[t]) for r, t in zip(wanted, tokens, strict=True)) < 0.2


async def test_tokens_that_the_checkpoint_bars_are_not_generated(bart: Any, tmp_path: Path) -> None:
    """As the padding token of Marian."""
    model, folder = bart
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    async with AsyncEngine(config(folder)) as engine:
        first = (await answer(engine, SOURCES[1])).outputs[0].token_ids
    barred = [[first[0]], [first[3]]]
    edit_json(tmp_path / "generation_config.json", bad_words_ids=barred)
    async with AsyncEngine(config(tmp_path)) as engine:
        output = await answer(engine, SOURCES[1])
    made = model.generate(
        torch.tensor([SOURCES[1]]), do_sample=False, max_new_tokens=OUTPUT, eos_token_id=None,
        bad_words_ids=barred,
    )  # fmt: skip
    assert made[0].tolist() == [2, *output.outputs[0].token_ids]


@pytest.mark.parametrize("caching", [True, False])
async def test_preempted_requests_say_the_same(caching: bool, bart: Any) -> None:
    """Blocks for the sources and some of the outputs. A source is found again, or encoded again if
    its blocks were taken meanwhile."""
    model, folder = bart
    options = {"num_gpu_blocks_override": 26, "enable_prefix_caching": caching}
    async with AsyncEngine(config(folder, **options)) as engine:
        plans = watched(engine)
        outputs = await at_once(engine, *(answer(engine, s, max_tokens=24) for s in SOURCES[1:]))
        assert engine.stats().num_preemptions > 0, "this is here to preempt"
        assert num_encoded(plans) > 3 or caching
        engine.core.check_idle()
    for source, output in zip(SOURCES[1:], outputs, strict=True):
        check(model, source, output, 24)


@pytest.mark.parametrize("caching", [True, False])
async def test_completions_of_one_call_share_the_encoded_source(caching: bool, bart: Any) -> None:
    model, folder = bart
    async with AsyncEngine(config(folder, enable_prefix_caching=caching)) as engine:
        plans = watched(engine)
        output = await answer(engine, SOURCES[2], n=3)
        assert num_encoded(plans) == 1
        check(model, SOURCES[2], output)
        await answer(engine, SOURCES[2])
        assert num_encoded(plans) == (1 if caching else 2), "equal sources share, with caching"


async def test_a_prefix_hit_is_of_the_same_source(bart: Any) -> None:
    """Equal decoder prompts, in chunks, after different sources: equal blocks for equal sources."""
    model, folder = bart
    begin = [2, *range(20, 47)]
    prompts = [{"encoder_prompt": SOURCES[n], "decoder_prompt": begin[1:]} for n in (1, 2, 1)]
    async with AsyncEngine(config(folder, max_num_batched_tokens=16)) as engine:
        outputs = [await answer(engine, prompt) for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 24]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == begin
        assert output.encoder_prompt_token_ids == prompt["encoder_prompt"]
        check(model, prompt["encoder_prompt"], output)


async def test_tenants_do_not_share_sources(bart: Any) -> None:
    _, folder = bart
    async with AsyncEngine(config(folder)) as engine:
        plans = watched(engine)
        for salt in ("a", "b", "b"):
            stream = engine.generate(SOURCES[1], SamplingParams(max_tokens=1), cache_salt=salt)
            assert [output async for output in stream]
        assert num_encoded(plans) == 2


async def test_a_step_encodes_whole_sources_within_its_budget(bart: Any) -> None:
    """A source longer than the budget of tokens is encoded alone."""
    model, folder = bart
    sources = [SOURCES[3], SOURCES[1], SOURCES[2], SOURCES[0]]
    async with AsyncEngine(config(folder, max_num_batched_tokens=16, max_num_seqs=4)) as engine:
        plans = watched(engine)
        outputs = await at_once(engine, *(answer(engine, source) for source in sources))
        engine.core.check_idle()
    encoded = [
        [item.source.num_tokens for item in encoded_by(plan)] for plan in plans if encoded_by(plan)
    ]
    assert sum(map(len, encoded)) == 4
    assert all(sum(each) <= 64 for each in encoded), "max_model_len is the most"
    assert any(len(each) > 1 for each in encoded)
    for source, output in zip(sources, outputs, strict=True):
        check(model, source, output)


async def test_streams_samples_and_scores_of_prompts(bart: Any) -> None:
    model, folder = bart
    begin = [2, 9, 11, 40]
    prompt = {"encoder_prompt": {"prompt_token_ids": SOURCES[1]}, "decoder_prompt": begin}
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=5, ignore_eos=True, prompt_logprobs=0, logprobs=0
    )
    async with AsyncEngine(config(folder)) as engine:
        outputs = [output async for output in engine.generate(prompt, params)]
        again = [output async for output in engine.generate(prompt, params)][-1]
    assert len(outputs) > 1
    last = outputs[-1]
    assert last.outputs[0].token_ids == again.outputs[0].token_ids
    wanted = scores(model, SOURCES[1], begin + last.outputs[0].token_ids)
    for number, token in enumerate(begin[1:]):
        told = last.prompt_logprobs[number + 1][token].logprob
        assert told == pytest.approx(float(wanted[number, token]), abs=1e-3)
    for number, token in enumerate(last.outputs[0].token_ids):
        told = last.outputs[0].logprobs[number][token].logprob
        assert told == pytest.approx(float(wanted[number + 3, token]), abs=1e-3)


async def test_an_aborted_request_leaves_nothing(bart: Any) -> None:
    _, folder = bart
    async with AsyncEngine(config(folder)) as engine:
        async for _ in engine.generate(SOURCES[2], SamplingParams(max_tokens=30, ignore_eos=True)):
            break
        assert engine.stats().kv_blocks_used == 0
        engine.core.check_idle()


BAD: list[tuple[Any, str]] = [
    ({"encoder_prompt": [], "decoder_prompt": None}, "encoder_prompt"),
    ({"encoder_prompt": None}, "encoder_prompt"),
    ({"encoder_prompt": [3, "x"]}, "encoder_prompt"),
    ({"encoder_prompt": [3, VOCAB]}, "encoder_prompt"),
    ({"encoder_prompt": [3] * 65}, "encoder_prompt"),
    ({"encoder_prompt": "text"}, "prompt"),
    ({"encoder_prompt": [3], "decoder_prompt": 7}, "decoder_prompt"),
    ({"encoder_prompt": [3], "decoder_prompt": [-1]}, "decoder_prompt"),
    ({"encoder_prompt": [3], "decoder_prompt": [3] * 63}, "decoder_prompt"),
    ({"decoder_prompt": [3]}, "prompt"),
    ({"encoder_prompt": [3], "image": 1}, "prompt"),
    ([3] * 65, "prompt"),
]


async def test_a_bad_prompt_is_refused_by_its_field(bart: Any) -> None:
    _, folder = bart
    async with AsyncEngine(config(folder, num_gpu_blocks_override=30)) as engine:
        for prompt, param in BAD:
            with pytest.raises(InvalidRequest) as caught:
                await anext(engine.generate(prompt, SamplingParams(max_tokens=1)))
            assert caught.value.param == param, prompt
            assert param in caught.value.message
        # 29 blocks: what the longest source leaves, and the last token needs none.
        output = await answer(engine, [3] * 64, max_tokens=None)
        assert len(output.outputs[0].token_ids) == (29 - 16) * 4 + 1 - 1


@pytest.mark.parametrize(
    "options",
    [
        {"kv_transfer_config": {"kv_connector": "cpu_offload", "kv_role": "kv_both"}},
        {"kv_compression": "window"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8"},
        {"runner": "pooling"},
    ],
)
async def test_what_sources_do_not_go_with_is_refused_by_name(
    options: dict[str, Any], bart: Any
) -> None:
    _, folder = bart
    given = {"model": str(folder), "skip_tokenizer_init": True, **options}
    with pytest.raises(ConfigError) as caught:
        await AsyncEngine(EngineConfig.from_options(given)).start()
    assert caught.value.param == next(iter(options))


async def test_a_decoder_takes_no_encoder_prompt() -> None:
    async with AsyncEngine(EngineConfig(device="cpu")) as engine:
        with pytest.raises(InvalidRequest, match="needs prompt or prompt_token_ids"):
            await anext(engine.generate({"encoder_prompt": "a", "decoder_prompt": "b"}))


async def test_over_http_the_prompt_is_the_encoders(bart: Any, tmp_path: Path) -> None:
    """With a tokenizer of one token per word."""
    model, folder = bart
    words = {f"w{number}": number for number in range(VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    edit_json(tmp_path / "generation_config.json", forced_bos_token_id=9)
    body = {"prompt": "w8 w30 w5", "max_tokens": 4, "temperature": 0, "logprobs": 0}
    engine_config = config(tmp_path, skip_tokenizer_init=False)
    async with (
        AsyncEngine(engine_config) as engine,
        TestClient(TestServer(make_app(engine))) as client,
    ):
        response = await client.post("/v1/completions", json=body | {"ignore_eos": True})
        told = await response.json()
        wanted = model.generate(
            torch.tensor([[8, 30, 5]]), do_sample=False, max_new_tokens=5, eos_token_id=None,
            forced_bos_token_id=9,
        )[0]  # fmt: skip
        assert wanted[:2].tolist() == [2, 9]
        assert told["choices"][0]["logprobs"]["tokens"] == [f"w{token}" for token in wanted[2:]]
        assert told["usage"]["prompt_tokens"] == 3 + 2
        for path, wrong, param in (
            ("completions", body | {"prompt": "w3 " * 65}, "prompt"),
            ("completions", body | {"echo": True}, "echo"),
            ("chat/completions", {"messages": [{"role": "user", "content": "w3"}]}, "messages"),
        ):
            response = await client.post(f"/v1/{path}", json=wrong)
            assert response.status == 400
            assert (await response.json())["error"]["param"] == param
