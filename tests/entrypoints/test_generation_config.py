"""What generation_config.json says of sampling: for requests that leave it open, on every route."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import MODEL, Server, engine_config, running, save_random

from jackfield import LLM, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, LoadError
from jackfield.core.loading.generation_config import NO_DEFAULTS, SamplingDefaults
from jackfield.core.loading.model_config import resolve_model_config

STORED = {
    "do_sample": True, "temperature": 0.0, "top_k": 20, "top_p": None, "max_new_tokens": 6,
    "eos_token_id": 2, "pad_token_id": 0, "transformers_version": "5.0.0",
}  # fmt: skip
CHAT: Any = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_random(tmp_path_factory.mktemp("random"))
    (path / "generation_config.json").write_text(json.dumps(STORED))
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running(engine_config(folder)) as item:
        yield item


def defaults(folder: Path, **options: Any) -> SamplingDefaults:
    return resolve_model_config(engine_config(folder, **options)).sampling


def test_what_the_options_mean(folder: Path, tmp_path: Path) -> None:
    assert defaults(folder) == SamplingDefaults({"temperature": 0.0, "top_k": 20}, 6)
    assert defaults(folder, generation_config="vllm") == NO_DEFAULTS
    other = {"min_p": 0.5, "repetition_penalty": 1.5, "eos_token_id": [1, 4]}
    (tmp_path / "generation_config.json").write_text(json.dumps(other))
    assert defaults(folder, generation_config=str(tmp_path)) == SamplingDefaults(
        {"min_p": 0.5, "repetition_penalty": 1.5}
    )
    stops = resolve_model_config(engine_config(folder, generation_config=str(tmp_path)))
    assert {1, 4} <= stops.eos_token_ids
    changed = {"temperature": 0.5, "max_new_tokens": 9}
    assert defaults(folder, override_generation_config=changed) == SamplingDefaults(
        {"temperature": 0.5, "top_k": 20}, 9
    )
    assert defaults(
        folder, generation_config="vllm", override_generation_config=changed
    ) == SamplingDefaults({"temperature": 0.5}, 9)


def test_a_model_without_the_file_has_no_defaults() -> None:
    assert resolve_model_config(EngineConfig()).sampling == NO_DEFAULTS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"generation_config": "nowhere"}, "generation_config: must be 'auto', 'vllm' or a folder"),
        ({"override_generation_config": {"temp": 1}}, r"override_generation_config\.temp"),
        ({"override_generation_config": {"top_p": 2}}, "override_generation_config: top_p must"),
        ({"override_generation_config": {"max_new_tokens": "9"}}, "max_tokens must be an integer"),
        ({"override_generation_config": [1]}, "override_generation_config"),
    ],
)
def test_wrong_options_are_refused_by_name(
    folder: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        defaults(folder, **options)
    assert refused.value.param in options


def test_a_wrong_file_is_refused_and_can_be_done_without(tmp_path: Path) -> None:
    save_random(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": -1}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature .* vllm does"):
        defaults(tmp_path)
    assert defaults(tmp_path, generation_config="vllm") == NO_DEFAULTS
    file.write_text("[1]")
    with pytest.raises(LoadError, match=r"generation_config\.json holds no JSON object"):
        defaults(tmp_path)


def test_requests_that_leave_it_open_get_the_models(
    server: Server, client: openai.OpenAI, folder: Path
) -> None:
    """Greedy, and six tokens at most: an answer that says nothing else."""
    texts = set()
    for request in ({}, {"temperature": 0}, {"max_tokens": 50}):
        response = client.chat.completions.create(
            model=MODEL, messages=CHAT, extra_body={"ignore_eos": True}, **request
        )
        assert response.usage is not None and response.usage.completion_tokens == 6
        texts.add(response.choices[0].message.content)
    assert len(texts) == 1
    ids = [3, 9, 27]
    texts = {
        client.completions.create(model=MODEL, prompt=ids, extra_body={"ignore_eos": True})
        .choices[0]
        .text
        for _ in range(3)
    }
    assert len(texts) == 1
    via_responses = client.responses.create(model=MODEL, input="Hello", max_output_tokens=40)
    assert via_responses.temperature == 0.0
    assert via_responses.usage is not None and via_responses.usage.output_tokens <= 6


def test_what_a_request_says_counts(client: openai.OpenAI) -> None:
    texts = {
        client.chat.completions.create(
            model=MODEL, messages=CHAT, temperature=1.5, seed=seed, max_tokens=3,
            extra_body={"ignore_eos": True, "top_k": 0},
        ).choices[0].message.content
        for seed in range(6)
    }  # fmt: skip
    assert len(texts) > 1
    response = client.responses.create(model=MODEL, input="Hello", temperature=0.25)
    assert response.temperature == 0.25


def test_it_holds_in_process_where_no_parameters_are_given(folder: Path) -> None:
    with LLM(str(folder), dtype="float32", num_gpu_blocks_override=50, max_model_len=64) as llm:
        value = llm.get_default_sampling_params()
        assert (value.temperature, value.top_k, value.max_tokens) == (0.0, 20, 6)
        (first,) = llm.generate([[3, 9, 27]], use_tqdm=False)
        (same,) = llm.generate([[3, 9, 27]], value, use_tqdm=False)
        assert first.outputs[0].token_ids == same.outputs[0].token_ids
        (own,) = llm.generate(
            [[3, 9, 27]], SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False
        )
        assert len(own.outputs[0].token_ids) == 12, "parameters that are given are all there is"
