"""Beam search, offline and over HTTP, beside transformers' and a search by hand over its logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from serving import MODEL, Server, engine_config, running, save_random

from jackfield import LLM, BeamSearchParams
from jackfield.core.errors import ContextLengthExceeded, InvalidRequest
from jackfield.entrypoints.beam_search import BeamSearchSequence

PROMPT = [40, 41, 42, 43]
PROMPTS = [PROMPT, [60, 61], [70]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


def offline(checkpoint: Path, **options: Any) -> LLM:
    config = engine_config(checkpoint, device="cpu", max_model_len=64, **options)
    return LLM(**{name: getattr(config, name) for name in config.__struct_fields__})


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with offline(checkpoint) as item:
        yield item


def by_hand(
    model: Any, prompt: Sequence[int], width: int, length: int, end: int | None, penalty: float
) -> list[tuple[list[int], float]]:
    """Output and log-probability of the best sequences, with all of each step's candidates."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []

    def score(item: tuple[list[int], float]) -> float:
        num_tokens = len(prompt) + len(item[0]) - (item[0][-1] == end)
        return item[1] / num_tokens**penalty

    for _ in range(length):
        going = []
        for tokens, total in beams:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
            best = logits.log_softmax(0).topk(2 * width)
            for logprob, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                (ended if token == end else going).append(([*tokens, token], total + logprob))
        beams = sorted(going, key=lambda item: -item[1])[:width]
    return sorted([*ended, *beams], key=score, reverse=True)[:width]


def found(sequence: BeamSearchSequence, prompt: Sequence[int]) -> list[int]:
    assert sequence.tokens[: len(prompt)] == prompt
    return sequence.tokens[len(prompt) :]


def test_sequences_are_those_of_transformers(llm: LLM, model: Any) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True)
    outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), num_beams=4, num_return_sequences=4, max_new_tokens=6,
            do_sample=False, length_penalty=0.0, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        assert [sequence.tokens for sequence in output.sequences] == theirs.sequences.tolist()
        totals = [sequence.cum_logprob for sequence in output.sequences]
        torch.testing.assert_close(
            torch.tensor(totals), theirs.sequences_scores, atol=1e-3, rtol=1e-3
        )
        for sequence in output.sequences:
            assert sequence.finish_reason == "length"
            chosen = zip(sequence.logprobs, found(sequence, prompt), strict=True)
            total = sum(position[token].logprob for position, token in chosen)
            assert total == pytest.approx(sequence.cum_logprob, abs=1e-4)


@pytest.mark.parametrize("penalty", [1.0, 0.0, -2.0, 3.0])
def test_sequences_end_and_are_ranked_by_length(
    checkpoint: Path, model: Any, penalty: float
) -> None:
    """The end is a token that likely sequences have in their middle."""
    end = by_hand(model, PROMPT, 3, 4, None, 0.0)[0][0][2]
    with offline(checkpoint, hf_overrides={"eos_token_id": end}) as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=7, length_penalty=penalty)
        [output] = llm.beam_search(PROMPT, params)
    target = by_hand(model, PROMPT, 3, 7, end, penalty)
    assert [found(sequence, PROMPT) for sequence in output.sequences] == [t for t, _ in target]
    for sequence, (tokens, total) in zip(output.sequences, target, strict=True):
        assert sequence.cum_logprob == pytest.approx(total, abs=1e-3)
        assert sequence.finish_reason == ("stop" if tokens[-1] == end else "length")
    reasons = {sequence.finish_reason for sequence in output.sequences}
    assert ("stop" in reasons) == (penalty < 2)  # Else length is worth more than likelihood.


def test_a_search_ends_where_nothing_can_become_better(
    checkpoint: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit, it would go on to the end of the context."""
    end = by_hand(model, PROMPT, 1, 2, None, 0.0)[0][0][1]
    with offline(checkpoint, hf_overrides={"eos_token_id": end}) as llm:
        counted, generate = [], llm.engine.generate
        monkeypatch.setattr(
            llm.engine, "generate", lambda *a, **k: counted.append(1) or generate(*a, **k)
        )
        params = BeamSearchParams(beam_width=1, max_tokens=60, length_penalty=0.0)
        [output] = llm.beam_search(PROMPT, params)
    assert found(output.sequences[0], PROMPT)[-1] == end
    assert len(counted) < 60
    target = by_hand(model, PROMPT, 1, 60, end, 0.0)
    assert [found(output.sequences[0], PROMPT)] == [tokens for tokens, _ in target]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"beam_width": 0}, "beam_width"), ({"beam_width": 11}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"), ({"length_penalty": "x"}, "length_penalty"),
        ({"max_tokens": 61}, "max_tokens"),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_by_name(llm: LLM, changes: Any, field: str) -> None:
    with pytest.raises((InvalidRequest, ContextLengthExceeded)) as refused:
        params = BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **changes})
        llm.beam_search(PROMPT, params)
    assert refused.value.param == field


# ---------------------------------------------------------------- HTTP


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with running(engine_config(checkpoint, device="cpu")) as running_server:
        yield running_server


def test_completions_are_the_best_sequences(client: openai.OpenAI, model: Any) -> None:
    body: Any = {"model": MODEL, "prompt": [PROMPT, PROMPTS[1]], "max_tokens": 4, "n": 2}
    extra = {"use_beam_search": True, "ignore_eos": True, "return_token_ids": True}
    answer: Any = client.completions.create(**body, logprobs=1, extra_body=extra)
    target = [by_hand(model, prompt, 2, 4, None, 1.0) for prompt in body["prompt"]]
    flat = [item for per_prompt in target for item in per_prompt]
    assert [choice.token_ids for choice in answer.choices] == [tokens for tokens, _ in flat]
    for choice, (_, total) in zip(answer.choices, flat, strict=True):
        assert sum(choice.logprobs.token_logprobs) == pytest.approx(total, abs=1e-3)
        assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 16 and answer.usage.prompt_tokens == 6
    plain: Any = client.completions.create(**body, extra_body=extra)
    assert [choice.text for choice in plain.choices] == [choice.text for choice in answer.choices]
    assert all(choice.logprobs is None for choice in plain.choices)


def test_chats_are_the_best_sequences(server: Server, client: openai.OpenAI, model: Any) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    prompt = httpx.post(f"{server.url}/tokenize", json={"messages": messages}).json()["tokens"]
    extra = {"use_beam_search": True, "ignore_eos": True, "return_token_ids": True}
    answer: Any = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=3, n=3, extra_body=extra
    )
    target = by_hand(model, prompt, 3, 3, None, 1.0)
    assert [choice.token_ids for choice in answer.choices] == [tokens for tokens, _ in target]
    assert answer.usage.prompt_tokens == len(prompt)
    assert all(choice.logprobs is None for choice in answer.choices)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"stream": True}, "stream"), ({"stop": ["x"]}, "stop"), ({"n": 11}, "n"),
        ({"presence_penalty": 1.0}, "presence_penalty"), ({"max_tokens": 600}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"length_penalty": 1e9}, "length_penalty"),
    ],
)  # fmt: skip
def test_what_a_search_cannot_do_is_refused_by_name(
    server: Server, path: str, changes: dict[str, Any], field: str
) -> None:
    body = {
        "prompt": PROMPT, "messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 2,
        "use_beam_search": True, "temperature": 0.5, "presence_penalty": 0.0, "stop": [], **changes,
    }  # fmt: skip
    response = httpx.post(f"{server.url}{path}", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
