"""Drafts for every kind of row: the tokens are those without drafts, whatever requests ask for."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from drafting import Asked, Pair
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jackfield import SamplingParams, StructuredOutputsParams
from jackfield.plugins.models import embedded

EMBEDDED = Path(embedded.__path__[0])
ENGINE: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "max_model_len": 160, "max_num_seqs": 6,
    "num_gpu_blocks_override": 120, "attention_backend": "torch", "block_size": 8,
    "max_num_batched_tokens": 48, "max_logprobs": -1, "reasoning_parser": "think_tags",
    "structured_outputs_config": {"disable_any_whitespace": True},
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["first kind", "second kind"]},
        "values": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["kind", "values"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": r"([a-d]{1,3} ){2,9}\."},
    {"choice": ("yes, of course", "yes, perhaps", "no")},
    {"json_object": True},
]


THREADS = {"executor": "rank_threads"}
COMPRESSION: dict[str, Any] = {
    "kv_compression_budget": 20, "kv_compression_interval": 7, "enable_prefix_caching": False,
    "block_size": 4, "num_gpu_blocks_override": 600,
}  # fmt: skip
CAPABILITIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tensor parallel": {**THREADS, "tensor_parallel_size": 2, "model": "dense"},
    "pipeline parallel": {
        **THREADS, "tensor_parallel_size": 2, "pipeline_parallel_size": 3, "model": "dense",
    },
    "KV connectors": {
        "kv_transfer_config": {
            "kv_connector": "cpu_offload",
            "kv_connector_extra_config": {"kv_offloading_size": 0.01},
        },
    },
    "sources": {"model": "sources"},
    "windows": {"model": "windows"},
    "states": {"model": "states"},
    "states in stages": {**THREADS, "pipeline_parallel_size": 2, "model": "states"},
    "KV compression": {"model": "dense", "kv_compression": "snap_kv", **COMPRESSION},
    "few blocks": {"num_gpu_blocks_override": 44},
    "no chunks": {"enable_chunked_prefill": False, "max_num_batched_tokens": 160},
}  # fmt: skip
BY_DAY = ("KV compression", "KV connectors", "sources", "states in stages", "windows")
"""The others' caches and ranks are these', or those of engines that EACH goes through."""


SIZES: dict[str, Any] = {
    "vocab_size": 1536, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "eos_token_id": 1529,
    "pad_token_id": 1527,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES},
    "windows": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], **SIZES,
    },
    "states": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 32,
        "conv_bias": False, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5, **SIZES,
    },
    "sources": {
        "architectures": ["BartForConditionalGeneration"], "model_type": "bart",
        "vocab_size": 1536, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32, "max_position_embeddings": 256, "pad_token_id": 1527,
        "bos_token_id": 0, "eos_token_id": 1529, "decoder_start_token_id": 1529,
        "is_encoder_decoder": True, "activation_function": "gelu",
    },
}  # fmt: skip
"""Random models, with the embedded one's tokenizer."""


def model_in(folder: Path, kind: str) -> Path:
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    (folder / "config.json").write_text(json.dumps(MODELS[kind]))
    return folder


class Engines:
    """Both engines, on a loop of their own."""

    def __init__(self, folder: Path, **options: Any) -> None:
        if kind := options.get("model"):
            options |= {"model": str(model_in(folder / kind, kind)), "load_format": "dummy"}
        self.compacts = "kv_compression" in options
        self.runner = asyncio.Runner()
        self.pair = self.runner.run(self._open(options))

    async def _open(self, options: dict[str, Any]) -> Pair:
        prompt = [1529] if "sources" in options.get("model", "") else None
        return await Pair({**ENGINE, **options}, decoder_prompt=prompt).__aenter__()

    def compare(self, asked: Asked) -> None:
        self.runner.run(self.pair.compare(asked))

    def close(self) -> None:
        self.runner.run(self.pair.__aexit__(None, None, None))
        self.runner.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("models"))
    yield made
    made.close()


def asking(**options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.8, "max_tokens": 18, "seed": 3, "ignore_eos": True, **options}
    )


EACH: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "presence and frequency": {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    "negative frequency": {"frequency_penalty": -1.5, "temperature": 0.0},
    "bad words": {"bad_words": [" the", "e", " of the", ", and"], "temperature": 0.0},
    "min_tokens": {
        "min_tokens": 9, "stop_token_ids": list(range(5, 300, 3)), "ignore_eos": False,
    },
    "penalties with logprobs": {"repetition_penalty": 1.3, "logprobs": 3},
    "all logprobs": {"presence_penalty": 0.5, "logprobs": 30},
    "logit_bias": {"logit_bias": {40: 4.0, 50: 3.0}, "frequency_penalty": 0.9},
    "allowed": {"allowed_token_ids": list(range(40, 60)), "repetition_penalty": 1.2},
    "filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.3},
    "a processor": {"extra_args": {"steered": 4.0, "late": 1.0}, "logprobs": 2},
    "a processor of a greedy row": {"extra_args": {"steered": 4.0}, "temperature": 0.0},
    "a processor with penalties": {
        "extra_args": {"steered": 3.0}, "frequency_penalty": 0.6, "bad_words": ["e"],
    },
    **{
        f"grammar {next(iter(kind))}": {
            "structured_outputs": StructuredOutputsParams(**kind), "ignore_eos": False,
        }
        for kind in GRAMMARS
    },
    "a grammar with penalties": {
        "structured_outputs": StructuredOutputsParams(json=SCHEMA), "ignore_eos": False,
        "frequency_penalty": 0.2, "logprobs": 2,
    },
    "a grammar with min_tokens": {
        "structured_outputs": StructuredOutputsParams(regex="[ab]{3,30}"), "ignore_eos": False,
        "min_tokens": 8,
    },
    "a grammar after its end": {
        "structured_outputs": StructuredOutputsParams(regex="[a-d]{12,20}"), "ignore_eos": True,
        "max_tokens": 30,
    },
    "a grammar after reasoning": {
        "structured_outputs": StructuredOutputsParams(json=SCHEMA, after_reasoning=True),
        "ignore_eos": False, "max_tokens": 60, "logit_bias": {},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EACH)
def test_a_row_with_drafts_asks_for(name: str, engines: Engines) -> None:
    """Alone, then beside a row that asks for nothing and one that has no drafts."""
    before = engines.pair.drafted.stats().spec_decode_num_accepted_tokens
    one: Asked = [(list(b"So it is that "), asking(**EACH[name]))]
    engines.compare(one)
    assert engines.pair.drafted.stats().spec_decode_num_accepted_tokens > before
    engines.compare([*one, ([5, 6, 7], asking(temperature=0.0)), ([9, 9], asking(max_tokens=1))])


def test_a_processor_that_counts_calls_has_rows_without_drafts(engines: Engines) -> None:
    """Beside rows with drafts, and one whose other processor would allow them."""
    before = engines.pair.drafted.stats().spec_decode_num_draft_tokens
    prompt = list(b"So it is that ")
    fading: Asked = [(prompt, asking(extra_args={"fading": 5.0, "steered": 1.0}))]
    engines.compare(fading)
    assert engines.pair.drafted.stats().spec_decode_num_draft_tokens == before
    engines.compare([*fading, (prompt, asking()), (prompt, asking(extra_args={"steered": 2.0}))])
    assert engines.pair.drafted.stats().spec_decode_num_draft_tokens > before


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("llguidance", 1), ("llguidance", 2),
        # Its sandboxes take seconds; that it forces what it says is in the kit of grammars.
        *(pytest.param("xgrammar", ranks, marks=pytest.mark.slow) for ranks in (1, 2)),
    ],
)  # fmt: skip
async def test_what_a_grammar_forces_is_a_draft(backend: str, ranks: int, tmp_path: Path) -> None:
    """Though the speculator proposes nothing; for several forced stretches, beside a row without
    a grammar."""
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
    options: dict[str, Any] = {
        "structured_outputs_config": {"disable_any_whitespace": True, "backend": backend},
    }
    if ranks > 1:
        model = str(model_in(tmp_path / "dense", "dense"))
        options |= {**THREADS, "tensor_parallel_size": ranks, "model": model}
        options["load_format"] = "dummy"
    asked: Asked = [
        (
            list(b"So it is that "),
            asking(
                temperature=temperature,
                ignore_eos=False,
                max_tokens=60,
                structured_outputs=grammar,
            ),
        )
        for temperature in (0.0, 0.8)
        for grammar in (
            StructuredOutputsParams(json=SCHEMA),
            StructuredOutputsParams(regex="a long beginning, [0-9]{3}, a long end"),
        )
    ]
    async with Pair({**ENGINE, **options}, method="silent") as pair:
        await pair.compare([*asked, ([5, 6, 7], asking())])
        assert pair.drafted.stats().spec_decode_num_accepted_tokens > 0


numbers = st.integers(3, 255)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], SamplingParams]:
    """Any mix of parameters."""
    some = st.booleans
    options: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.7, 1.3])),
        "seed": draw(st.integers(0, 99)),
        "max_tokens": draw(st.integers(1, 30)),
        "ignore_eos": draw(some()),
        "n": draw(st.sampled_from([1, 1, 1, 2])),
    }
    for name, values in {
        "top_k": st.integers(1, 40),
        "top_p": st.sampled_from([0.5, 0.9]),
        "min_p": st.sampled_from([0.01, 0.2]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "presence_penalty": st.sampled_from([-0.5, 0.9]),
        "frequency_penalty": st.sampled_from([-0.5, 0.4]),
        "logprobs": st.sampled_from([0, 2, 25]),
        "prompt_logprobs": st.sampled_from([0, 2]),
        "min_tokens": st.integers(1, options["max_tokens"]),
        "stop_token_ids": st.lists(numbers, min_size=1, max_size=40),
        "stop": st.sampled_from([["e"], ["the", " o"]]),
        "bad_words": st.sampled_from([["e", " the"], [", and", "of the", "a"]]),
        "logit_bias": st.dictionaries(numbers, st.sampled_from([-3.0, 4.0]), min_size=1),
        "allowed_token_ids": st.lists(numbers, min_size=2, max_size=9, unique=True),
    }.items():
        if draw(st.integers(0, 3)) == 0:
            options[name] = draw(values)
    if draw(st.integers(0, 4)) == 0:
        names = st.sampled_from(["steered", "late", "fading"])
        options["extra_args"] = draw(
            st.dictionaries(names, st.sampled_from([0.5, 3.0]), min_size=1)
        )
    if draw(st.integers(0, 2)) == 0:
        options.pop("allowed_token_ids", None)
        kind = draw(st.sampled_from(GRAMMARS))
        after = draw(st.sampled_from([None, None, True]))
        options["structured_outputs"] = StructuredOutputsParams(**kind, after_reasoning=after)
    prompt = draw(st.lists(numbers, min_size=1, max_size=60))
    return prompt, SamplingParams(**options)


mixes = given(asked=st.lists(requests(), min_size=1, max_size=6))
options_of_search: dict[str, Any] = {
    "deadline": None, "derandomize": True, "database": None,
    "suppress_health_check": list(HealthCheck), "phases": [Phase.generate],
}  # fmt: skip


def without_siblings(asked: Asked) -> Asked:
    """One completion of each: what siblings have in common is not compacted, if one has begun by
    then."""
    return [(prompt, msgspec.structs.replace(params, n=1)) for prompt, params in asked]


def check_mixes(engines: Engines, count: int) -> None:
    """Compare so many mixes, of which some drafts are accepted."""

    @settings(max_examples=count, **options_of_search)
    @mixes
    def check(asked: Asked) -> None:
        if engines.compacts:
            asked = without_siblings(asked)
        engines.compare(asked)

    before = engines.pair.drafted.stats().spec_decode_num_accepted_tokens
    check()
    assert engines.pair.drafted.stats().spec_decode_num_accepted_tokens > before


@pytest.mark.parametrize(
    "capability",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in BY_DAY)) for name in CAPABILITIES],
)
def test_mixes_of_rows_give_the_tokens_of_an_engine_without_drafts(
    capability: str, tmp_path: Path
) -> None:
    engines = Engines(tmp_path, **CAPABILITIES[capability])
    check_mixes(engines, 4)
    engines.close()


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_ten_thousand_mixes_of_rows(capability: str, tmp_path: Path) -> None:
    """A night's work, too."""
    engines = Engines(tmp_path, **CAPABILITIES[capability])
    check_mixes(engines, 10_000 // len(CAPABILITIES))
    engines.close()
