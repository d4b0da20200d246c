"""A server with `--speculative-config`, as vLLM's users write it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from serving import running

from jackfield import EngineConfig
from jackfield.entrypoints.flags.engine_flags import engine_options
from jackfield.entrypoints.server.serve_settings import make_parser

FLAG = {
    "method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
    "adaptive_width": False,  # The same drafts however long steps take.
}  # fmt: skip
COMMON = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "160"]
TEXT = "the cat sat on the mat and " * 4


def client_of(*flags: str) -> Iterator[httpx.Client]:
    options = engine_options(make_parser().parse_args([*COMMON, *flags]))
    with (
        running(EngineConfig.from_options(options)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def drafting() -> Iterator[httpx.Client]:
    yield from client_of("--speculative-config", json.dumps(FLAG))


@pytest.fixture(scope="module")
def plain() -> Iterator[httpx.Client]:
    yield from client_of()


def counted(client: httpx.Client) -> dict[str, float]:
    """Counters of speculative decoding, by name and position."""
    values = {}
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("jackfield:spec_decode") and "_created" not in line:
            name, _, value = line.rpartition(" ")
            position = name.partition('position="')[2].partition('"')[0]
            values[name.partition(":")[2].partition("{")[0] + position] = float(value)
    return values


def completion(client: httpx.Client, **fields: object) -> dict:
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = {
        "model": model, "prompt": TEXT, "max_tokens": 40, "temperature": 0, "ignore_eos": True,
        "logprobs": 1, **fields,
    }  # fmt: skip
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    del answer["usage"]["prompt_tokens_details"]  # Cached tokens: other tests ask the same.
    answer["usage"].pop("completion_tokens_details", None)  # Drafts.
    choice = answer["choices"][0]
    return {
        "text": choice["text"], "reason": choice["finish_reason"], "usage": answer["usage"],
        "stop": choice.get("stop_reason"), "tokens": choice["logprobs"]["tokens"],
        "logprobs": choice["logprobs"]["token_logprobs"],
    }  # fmt: skip


def assert_same(one: dict, other: dict) -> None:
    assert one == {**other, "logprobs": pytest.approx(other["logprobs"], abs=1e-3)}


def test_responses_are_the_same(drafting: httpx.Client, plain: httpx.Client) -> None:
    """Text, usage and log-probabilities; also where a stop string ends them among accepted
    drafts."""
    whole = completion(plain)
    assert_same(completion(drafting), whole)
    half = len(whole["tokens"]) // 2
    stop = "".join(whole["tokens"][half : half + 2])
    assert_same(completion(drafting, stop=[stop]), completion(plain, stop=[stop]))
    grammar = {"structured_outputs": {"regex": "(ab){3,9}"}, "ignore_eos": False}
    assert_same(completion(drafting, **grammar), completion(plain, **grammar))


def test_a_stream_has_the_same_text(drafting: httpx.Client, plain: httpx.Client) -> None:
    def streamed(client: httpx.Client) -> str:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {
            "model": model, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 30,
            "temperature": 0.7, "seed": 3, "stream": True,
        }  # fmt: skip
        lines = client.post("/v1/chat/completions", json=body).text.split("\n\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)

    assert streamed(drafting) == streamed(plain) != ""


def test_usage_says_what_became_of_drafts(drafting: httpx.Client, plain: httpx.Client) -> None:
    """In OpenAI's fields, whole and streamed, over all choices; without drafts there are none."""

    def details(client: httpx.Client, path: str, key: str, **fields: object) -> dict[str, int]:
        model = client.get("/v1/models").json()["data"][0]["id"]
        more = {"temperature": 0, "ignore_eos": True, **fields}
        response = client.post(path, json={"model": model, **more})
        assert response.status_code == 200, response.text
        if fields.get("stream"):
            lines = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
            answer = json.loads(lines[-1][6:])
        else:
            answer = response.json()
        return answer["usage"].get(key) or {}

    messages = [{"role": "user", "content": TEXT}]
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    asked: list[tuple[str, str, dict[str, object]]] = []
    for more in ({}, streamed):
        asked += [
            ("/v1/completions", "completion_tokens", {"prompt": [TEXT, "a b c"], "max_tokens": 40}),
            ("/v1/chat/completions", "completion_tokens", {"messages": messages, "n": 2}),
        ]
        asked = [(path, key, {**fields, **more}) for path, key, fields in asked]
    asked.append(("/v1/responses", "output_tokens", {"input": TEXT, "max_output_tokens": 40}))
    for path, key, fields in asked:
        if "messages" in fields:
            fields |= {"max_completion_tokens": 40, "temperature": 0.4, "seed": 1}
        before = counted(drafting)
        found = details(drafting, path, f"{key}_details", **fields)
        after = counted(drafting)
        drafted = "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"
        verified, accepted = (after[name] - before[name] for name in drafted)
        assert found["accepted_prediction_tokens"] == accepted > 0, path
        assert found["rejected_prediction_tokens"] == verified - accepted
        assert "accepted_prediction_tokens" not in details(plain, path, f"{key}_details", **fields)


@pytest.fixture(scope="module")
def predicting() -> Iterator[httpx.Client]:
    config: dict[str, object] = {"method": "suffix", "num_speculative_tokens": 6}
    config["adaptive_width"] = False
    config["suffix_decoding_max_cached_requests"] = 0
    yield from client_of("--speculative-config", json.dumps(config))


def test_a_predicted_output_is_drafted(predicting: httpx.Client, plain: httpx.Client) -> None:
    """The same answer; a right prediction is accepted, a wrong one costs nothing but its drafts."""

    def asked(client: httpx.Client, **fields: object) -> tuple[str, int]:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {
            "model": model, "messages": [{"role": "user", "content": "Tell me something."}],
            "max_completion_tokens": 40, "temperature": 0, "ignore_eos": True, **fields,
        }  # fmt: skip
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        details = answer["usage"].get("completion_tokens_details") or {}
        content = answer["choices"][0]["message"]["content"]
        return content, details.get("accepted_prediction_tokens", 0)

    text, _ = asked(plain)
    whole: dict[str, object] = {"type": "content", "content": text}
    parts = {**whole, "content": [{"type": "text", "text": t} for t in (text[:9], text[9:])]}
    wrong = {**whole, "content": "Something else is said here. " * 9}
    same, own = asked(predicting)
    assert same == text
    for prediction in (whole, parts):
        predicted, accepted = asked(predicting, prediction=prediction)
        assert predicted == text and accepted > own + 9
        assert asked(plain, prediction=prediction) == (text, 0)
    assert asked(predicting, prediction=wrong)[0] == text
    for content in (3, None, [{"type": "image_url"}], [{"type": "text"}]):
        body = {"messages": [], "prediction": {"type": "content", "content": content}}
        response = predicting.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prediction.content"


def test_metrics_count_drafts(drafting: httpx.Client, plain: httpx.Client) -> None:
    completion(drafting)
    counts = counted(drafting)
    assert 0 < counts["spec_decode_num_accepted_tokens_total"]
    assert (
        counts["spec_decode_num_accepted_tokens_total"]
        <= counts["spec_decode_num_draft_tokens_total"]
        <= 5 * counts["spec_decode_num_drafts_total"]
    )
    at = [counts[f"spec_decode_num_accepted_tokens_per_pos_total{place}"] for place in range(5)]
    assert sum(at) == counts["spec_decode_num_accepted_tokens_total"]
    assert at == sorted(at, reverse=True)
    assert not any(counted(plain).values())
