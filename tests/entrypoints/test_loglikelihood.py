"""Log-likelihoods over /v1/completions, asked for as lm_eval's local-completions does,
against transformers.

A harness sends context and continuation as one prompt, with `echo`, `logprobs: 1`, and one token
(or none) to generate; it drops what was generated, sums the continuation's `token_logprobs`, and
calls it greedy when each token is the likeliest of its `top_logprobs`.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from serving import MODEL, Server, engine_config, running, save_random

import jackfield
from jackfield import EngineConfig, SamplingParams

from helpers import reference_model

EMBEDDED = Path(jackfield.__file__).parent / "plugins" / "models" / "embedded"
FEW_SHOTS = "Question: What is 2 + 3?\nAnswer: 5\n\nQuestion: What is 4 + 4?\nAnswer: 8\n\n" * 4
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
PAIRS = [
    (CHAT.format("What is Jackfield?") + "Jackfield", " is an LLM serving engine"),
    ("Jackfield is an", " LLM serving engine"),
    ("The quick brown", " fox jumps over the lazy dog."),
    ("Grüße aus", " 日本 🙂"),
    (FEW_SHOTS + "Question: What is 1 + 6?\nAnswer:", " 7"),
    (FEW_SHOTS + "Question: What is 1 + 6?\nAnswer:", " 9"),
    (FEW_SHOTS + "Question: What is 5 + 2?\nAnswer:", " 7\n\nQuestion: What is"),
]


class Scored(NamedTuple):
    """A continuation's log-likelihood."""

    logprob: float
    greedy: bool
    ids: list[int]
    logprobs: list[float]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        served_model_name=("tiny",),
        max_num_batched_tokens=48,  # So that prompts are computed in several chunks.
        max_num_seqs=8,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
    )
    with running(config) as item:
        yield item


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model(EMBEDDED)


def encode(server: Server, text: str) -> list[int]:
    assert server.engine.tokenizer is not None
    return server.engine.tokenizer.encode(text)


def split(server: Server, context: str, continuation: str) -> tuple[list[int], int]:
    """→ (ids of both together, how many are the context's)"""
    whole = encode(server, context + continuation)
    return whole, len(encode(server, context))


@torch.no_grad()
def expected(reference: Any, ids: list[int], num_context: int) -> Scored:
    """The continuation's log-probabilities, one forward pass without a cache."""
    logits = reference(torch.tensor([ids]), use_cache=False).logits[0].float()
    table = torch.log_softmax(logits, -1)
    places = range(num_context, len(ids))
    logprobs = [float(table[place - 1, ids[place]]) for place in places]
    greedy = all(int(table[place - 1].argmax()) == ids[place] for place in places)
    return Scored(sum(logprobs), greedy, ids[num_context:], logprobs)


def scored(choice: dict[str, Any], num_context: int, generated: int) -> Scored:
    """As harnesses take a choice apart."""
    table = choice["logprobs"]
    end = len(table["tokens"]) - generated
    tokens = table["tokens"][num_context:end]
    logprobs = table["token_logprobs"][num_context:end]
    tops = table["top_logprobs"][num_context:end]
    greedy = all(
        token == max(top, key=top.__getitem__) for token, top in zip(tokens, tops, strict=True)
    )
    ids = [int(token.removeprefix("token_id:")) for token in tokens if token.startswith("token_id")]
    return Scored(sum(logprobs), greedy, ids, logprobs)


def ask(server: Server, prompts: Any, **options: Any) -> list[dict[str, Any]]:
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    response = httpx.post(server.url + "/v1/completions", json=body | options, timeout=300)
    assert response.status_code == 200, response.text
    if options.get("max_tokens") == 0:
        assert response.json()["usage"]["completion_tokens"] == 0
    return sorted(response.json()["choices"], key=lambda choice: choice["index"])


def same(mine: Scored, theirs: Scored) -> None:
    assert len(mine.logprobs) == len(theirs.logprobs) > 0
    torch.testing.assert_close(
        torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, rtol=1e-4
    )
    assert math.isclose(mine.logprob, theirs.logprob, abs_tol=1e-3)
    assert mine.greedy is theirs.greedy


@pytest.mark.parametrize("max_tokens", [1, 0])
@pytest.mark.parametrize("as_ids", [True, False], ids=["ids", "strings"])
def test_log_likelihoods_are_those_of_transformers(
    server: Server, reference: Any, as_ids: bool, max_tokens: int
) -> None:
    cases = [split(server, *pair) for pair in PAIRS]
    prompts = [
        ids if as_ids else "".join(pair) for (ids, _), pair in zip(cases, PAIRS, strict=True)
    ]
    choices = ask(server, prompts, max_tokens=max_tokens)
    assert len(choices) == len(PAIRS)
    scores = []
    for choice, (ids, num_context), pair in zip(choices, cases, PAIRS, strict=True):
        mine, theirs = (
            scored(choice, num_context, max_tokens),
            expected(reference, ids, num_context),
        )
        same(mine, theirs)
        scores.append(theirs.greedy)
        table = choice["logprobs"]
        assert table["token_logprobs"][0] is None and table["top_logprobs"][0] is None
        assert {len(column) for column in table.values()} == {len(ids) + max_tokens}
        assert choice["text"].startswith("".join(pair))
        if max_tokens == 0:
            assert choice["text"] == "".join(pair)
    assert len(set(scores)) == 2, "both greedy and other continuations are among the cases"


def test_the_likeliest_answer_wins(server: Server) -> None:
    """Multiple choice: what the harness would pick."""
    context = "<|im_start|>user\nCopy: river<|im_end|>\n<|im_start|>assistant\n"
    num_context = len(encode(server, context))
    prompts = [encode(server, context + word) for word in ("river", "stone")]
    right, wrong = (scored(choice, num_context, 1) for choice in ask(server, prompts))
    assert right.logprob > wrong.logprob


def test_cached_prefixes_change_nothing(server: Server, reference: Any) -> None:
    """What came before leaves blocks that the same context would hit."""
    ids, num_context = split(server, *PAIRS[-1])
    theirs = expected(reference, ids, num_context)
    plain = {"echo": False, "logprobs": None}
    server.call(lambda engine: engine.reset_prefix_cache())
    cold = ask(server, ids)[0]
    ask(server, ids[:num_context], **plain)
    before = server.engine.stats().prefix_cache_hits
    ask(server, ids, **plain)
    assert server.engine.stats().prefix_cache_hits >= before + 32, "there is something to hit"
    warm = ask(server, ids)[0]
    for choice in (cold, warm):
        same(scored(choice, num_context, 1), theirs)
    assert warm["logprobs"]["tokens"] == cold["logprobs"]["tokens"]


async def test_many_at_once_are_as_one_by_one(server: Server, reference: Any) -> None:
    """Batches of several requests, which share steps and chunks."""
    cases = [split(server, *pair) for pair in PAIRS]
    body = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        responses = await asyncio.gather(
            *(
                client.post("/v1/completions", json={"prompt": [ids, ids], **body})
                for ids, _ in cases
            )
        )
    for response, (ids, num_context) in zip(responses, cases, strict=True):
        for choice in response.json()["choices"]:
            same(scored(choice, num_context, 1), expected(reference, ids, num_context))


def test_tokens_can_be_identified_by_their_ids(server: Server, reference: Any) -> None:
    ids, num_context = split(server, *PAIRS[2])
    (choice,) = ask(server, ids, return_tokens_as_token_ids=True)
    mine = scored(choice, num_context, 1)
    assert mine.ids == ids[num_context:]
    same(mine, expected(reference, ids, num_context))


def test_prompt_logprobs_are_those_of_transformers(server: Server, reference: Any) -> None:
    ids, _ = split(server, *PAIRS[3])
    table = expected(reference, ids, 1).logprobs
    (choice,) = ask(server, ids, echo=False, logprobs=None, prompt_logprobs=2)
    assert choice["prompt_logprobs"][0] is None
    own = [
        position[str(token)]["logprob"]
        for token, position in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
    ]
    torch.testing.assert_close(torch.tensor(own), torch.tensor(table), atol=1e-4, rtol=1e-4)
    assert all(2 <= len(position) <= 3 for position in choice["prompt_logprobs"][1:])


def test_offsets_find_each_token_in_the_text(server: Server) -> None:
    """Behind characters that several tokens spell, too."""
    (choice,) = ask(server, "日本 🙂 Grüße: the quick brown fox", max_tokens=0)
    table, text = choice["logprobs"], choice["text"]
    pieces = list(zip(table["tokens"], table["text_offset"], strict=True))
    assert pieces[0][1] == 0 and any(token.startswith("bytes:") for token, _ in pieces)
    whole = [(token, start) for token, start in pieces if not token.startswith("bytes:")]
    assert len(whole) > 5
    assert all(text[start:].startswith(token) for token, start in whole)


def test_an_echo_is_the_text_that_was_sent_whatever_its_tokens_say(tmp_path: Path) -> None:
    """A prompt begins with the tokenizer's own token, and loses its capitals."""
    folder = save_random(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    begin = "<|im_start|>"
    (number,) = (each["id"] for each in tokenizer["added_tokens"] if each["content"] == begin)
    first = {"SpecialToken": {"id": begin, "type_id": 0}}
    rest = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [first, rest], "pair": [first, rest],
        "special_tokens": {begin: {"id": begin, "ids": [number], "tokens": [begin]}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    body = {"model": MODEL, "max_tokens": 1, "echo": True, "temperature": 0}
    with jackfield.LLM(str(folder), dtype="float32", num_gpu_blocks_override=200) as llm:
        (output,) = llm.generate(["Hello"], SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.prompt_token_ids[0] == number
    with running(engine_config(folder)) as lossy:
        for prompt in ("Hello There", ["Hello There", "AND You"]):
            answer = httpx.post(lossy.url + "/v1/completions", json={**body, "prompt": prompt})
            sent = [prompt] if isinstance(prompt, str) else prompt
            tokens = [
                httpx.post(lossy.url + "/tokenize", json={"prompt": text}).json()["tokens"]
                for text in sent
            ]
            assert all(each[0] == number for each in tokens)
            assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, tokens))
            for choice, text in zip(answer.json()["choices"], sent, strict=True):
                assert choice["text"].startswith(text)
