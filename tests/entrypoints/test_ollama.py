"""Ollama's routes with its real Python client: chats, tools, thinking, formats, facts, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from encoders import save_encoder, save_word_tokenizer
from serving import MODEL, SCRIPT, Server, engine_config, running, save_random, save_scripted

from jackfield import EngineConfig
from jackfield.entrypoints.http.options import ServerOptions

if TYPE_CHECKING:
    import ollama

HELLO: Any = [{"role": "user", "content": "Hello"}]
REPEATED = "One day, the dog saw the dog and the dog saw"
GREEDY: Any = {"temperature": 0, "num_predict": 40}
PAIR: Any = {
    "type": "object",
    "properties": {"left": {"enum": ["a", "b"]}, "right": {"type": "integer", "maximum": 99}},
    "required": ["left", "right"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", autouse=True)
def sdk() -> None:
    """Import the client where these tests run."""
    global ollama
    import ollama


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The embedded model, without its page."""
    config = EngineConfig(
        device="cpu",
        served_model_name=(MODEL,),
        max_num_seqs=16,
        max_model_len=256,
        structured_outputs_config={"disable_any_whitespace": True},  # type: ignore[arg-type]
    )
    with running(config, ServerOptions(playground=False)) as item:
        yield item


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It thinks, says something, and calls a tool."""
    checkpoint = save_scripted(tmp_path_factory.mktemp("scripted"))
    config = engine_config(checkpoint, reasoning_parser="qwen3", tool_call_parser="hermes")
    with running(config) as item:
        yield item


@pytest.fixture(scope="module")
def pooler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("encoder")
    save_word_tokenizer(folder)
    save_encoder(folder, "Bert")
    with running(EngineConfig(model=str(folder), served_model_name=(MODEL,), device="cpu")) as item:
        yield item


@pytest.fixture
def client(server: Server) -> ollama.Client:
    return ollama.Client(server.url)


def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: where
    """
    return f"sunny in {city}"


def openai_text(server: Server, **body: Any) -> str:
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 40, **body}
    response = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)
    return str(response.json()["choices"][0]["message"]["content"])


# ---------------------------------------------------------------- text and streams


def test_a_chat_is_that_of_the_sibling_route(server: Server, client: ollama.Client) -> None:
    whole = client.chat(MODEL, HELLO, options=GREEDY)
    assert whole.message.content == openai_text(server)
    assert whole.model == MODEL and whole.message.role == "assistant"
    parts = list(client.chat(f"{MODEL}:latest", HELLO, options=GREEDY, stream=True))
    assert "".join(p.message.content or "" for p in parts) == whole.message.content
    assert [p.done for p in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert last.model == f"{MODEL}:latest"
    for answer in (whole, last):
        assert answer.done_reason == "stop"
        assert (answer.prompt_eval_count, answer.eval_count) == (
            whole.prompt_eval_count,
            whole.eval_count,
        )
        assert answer.total_duration > 0 and answer.load_duration == 0
        assert answer.eval_duration is not None and answer.eval_duration >= 0
        assert answer.total_duration >= answer.eval_duration + answer.prompt_eval_duration
    usage = httpx.post(
        server.url + "/v1/chat/completions",
        json={"messages": HELLO, "temperature": 0, "max_tokens": 40},
    ).json()["usage"]
    assert (whole.prompt_eval_count, whole.eval_count) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def test_streaming_is_the_default_and_has_a_line_of_json_each(server: Server) -> None:
    body = {"model": MODEL, "messages": HELLO, "options": GREEDY}
    response = httpx.post(server.url + "/api/chat", json=body)
    assert response.headers["Content-Type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert len(lines) > 1 and lines[-1]["done"]
    whole = httpx.post(server.url + "/api/chat", json={**body, "stream": False})
    assert whole.headers["Content-Type"].startswith("application/json")
    assert whole.json()["done"]


def test_num_predict_limits_the_output(client: ollama.Client) -> None:
    answer = client.chat(MODEL, HELLO, options={"num_predict": 3, "temperature": 0})
    assert (answer.eval_count, answer.done_reason) == (3, "length")
    # More than the context has room for: it ends where the context does.
    answer = client.generate(
        MODEL, "Once", raw=True, options={"num_predict": 9000, "temperature": 0, "seed": -1}
    )
    assert answer.done_reason in ("stop", "length") and answer.eval_count < 256


def test_options_are_those_of_the_sibling_route(server: Server, client: ollama.Client) -> None:
    options = {"seed": 7, "temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.01,
               "repeat_penalty": 1.4, "presence_penalty": 0.1, "frequency_penalty": 0.2,
               "num_predict": 30, "stop": ["\n\n"], "num_ctx": 8192, "num_thread": 4}  # fmt: skip
    fields = {"seed": 7, "temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.01,
              "repetition_penalty": 1.4, "presence_penalty": 0.1, "frequency_penalty": 0.2,
              "max_tokens": 30, "stop": ["\n\n"]}  # fmt: skip

    def completed(**changes: Any) -> str:
        body = {"prompt": REPEATED, **fields, **changes}
        response = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
        return str(response.json()["choices"][0]["text"])

    def generated(**changes: Any) -> str:
        asked: Any = {**options, **changes}
        return client.generate(MODEL, REPEATED, raw=True, options=asked, keep_alive="5m").response

    assert generated() == completed() != completed(repetition_penalty=1.0)
    assert generated(repeat_last_n=0) == completed(repetition_penalty=1.0)
    assert generated(top_k=-1) == completed(top_k=0)


def test_stop_strings_end_the_output(server: Server, client: ollama.Client) -> None:
    text = openai_text(server)
    stop = text.split()[1]
    answer = client.chat(MODEL, HELLO, options={**GREEDY, "stop": [stop]})
    assert answer.message.content == text.partition(stop)[0]


def test_generate_is_a_chat_of_one_prompt_and_raw_a_completion(
    server: Server, client: ollama.Client
) -> None:
    answer = client.generate(MODEL, "Hello", system="Be brief.", options=GREEDY)
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert answer.response == openai_text(server, messages=messages)
    body = {"prompt": "Once upon", "temperature": 0, "max_tokens": 12}
    completion = httpx.post(server.url + "/v1/completions", json=body).json()["choices"][0]["text"]
    options = {"temperature": 0, "num_predict": 12}
    assert client.generate(MODEL, "Once upon", raw=True, options=options).response == completion
    parts = client.generate(MODEL, "Once upon", raw=True, options=options, stream=True)
    assert "".join(part.response for part in parts) == completion


def test_log_probabilities_are_those_of_the_sibling_route(
    server: Server, client: ollama.Client
) -> None:
    options = {"temperature": 0, "num_predict": 4}
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 4, "logprobs": True,
            "top_logprobs": 2}  # fmt: skip
    expected = httpx.post(server.url + "/v1/chat/completions", json=body).json()
    expected = expected["choices"][0]["logprobs"]["content"]
    asked: Any = {"options": options, "logprobs": True, "top_logprobs": 2}
    whole = client.chat(MODEL, HELLO, **asked)
    streamed = [
        entry
        for part in client.chat(MODEL, HELLO, stream=True, **asked)
        for entry in part.logprobs or ()
    ]
    for entries in (whole.logprobs, streamed):
        assert [entry.token for entry in entries] == [entry["token"] for entry in expected]
        assert [len(entry.top_logprobs) for entry in entries] == [2] * 4
        assert [e.logprob for e in entries] == pytest.approx(
            [e["logprob"] for e in expected], abs=1e-3
        )
    assert client.generate(MODEL, "Once", raw=True, **asked).logprobs[3].top_logprobs


# ---------------------------------------------------------------- formats, tools, thinking


@pytest.mark.parametrize("raw", [False, True])
def test_a_schema_holds(client: ollama.Client, raw: bool) -> None:
    options = {"temperature": 1.0, "num_predict": 60, "seed": 5}
    answer = client.generate(MODEL, "A pair", raw=raw, format=PAIR, options=options)
    pair = json.loads(answer.response)
    assert pair["left"] in "ab" and 0 <= abs(pair["right"]) <= 99
    answer = client.chat(MODEL, HELLO, format=PAIR, options=options)
    assert set(json.loads(answer.message.content)) == {"left", "right"}


def test_json_is_an_object(client: ollama.Client) -> None:
    body = client.chat(MODEL, HELLO, format="json", options={"temperature": 0, "num_predict": 1})
    assert body.message.content.startswith("{")


def test_a_tool_is_called_and_its_result_goes_back(scripted: Server) -> None:
    client = ollama.Client(scripted.url)
    asks = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    whole = client.chat(MODEL, asks, tools=[get_weather], options={"temperature": 0})
    message = whole.message
    assert message.thinking == "two and two" and message.content == "Let me look."
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Lisbon"})
    parts = list(
        client.chat(MODEL, asks, tools=[get_weather], options={"temperature": 0}, stream=True)
    )
    assert "".join(p.message.thinking or "" for p in parts) == message.thinking
    assert "".join(p.message.content or "" for p in parts) == message.content
    assert [c for p in parts for c in p.message.tool_calls or ()] == [call]
    result = get_weather(**call.function.arguments)
    answers: Any = [{"role": "tool", "content": result, "tool_name": call.function.name}]
    again = client.chat(MODEL, [*asks, message, *answers], options={"temperature": 0})
    assert again.done


def test_a_call_that_is_cut_off_has_its_whole_values(scripted: Server) -> None:
    client = ollama.Client(scripted.url)
    options = {"temperature": 0, "num_predict": len(SCRIPT) - 2}
    for stream in (False, True):
        answer: Any = client.chat(MODEL, HELLO, tools=[get_weather], options=options, stream=stream)
        parts = list(answer) if stream else [answer]
        (call,) = [c for p in parts for c in p.message.tool_calls or ()]
        assert call.function.name == "get_weather"
        assert parts[-1].done_reason == "length"


def test_thinking_is_turned_off_and_hidden(scripted: Server) -> None:
    client = ollama.Client(scripted.url)
    for think, shown in ((True, "two and two"), (None, "two and two"), ("high", "two and two")):
        assert client.chat(MODEL, HELLO, think=think).message.thinking == shown
    assert not client.chat(MODEL, HELLO, think=False).message.thinking
    assert client.generate(MODEL, "Hello", think=True).thinking == "two and two"


def test_a_model_without_parsers_says_what_it_cannot(tmp_path: Path) -> None:
    with running(engine_config(save_random(tmp_path))) as plain:
        client = ollama.Client(plain.url)
        assert client.show(MODEL).capabilities == ["completion"]
        for asked in ({"think": True}, {"tools": [get_weather]}):
            with pytest.raises(ollama.ResponseError, match=f"{next(iter(asked))}: ") as caught:
                client.chat(MODEL, HELLO, **asked)
            assert caught.value.status_code == 400
        options = {"num_predict": 1}
        assert client.chat(MODEL, HELLO, think=False, options=options).eval_count == 1


# ---------------------------------------------------------------- long conversations


def test_the_oldest_turns_are_left_out_of_a_long_conversation(
    server: Server, client: ollama.Client
) -> None:
    turns = [
        {"role": role, "content": f"turn {number} " + "word " * 20}
        for number in range(12)
        for role in ("user", "assistant")
    ]
    messages = [{"role": "system", "content": "Be brief."}, *turns, *HELLO]
    options = {"temperature": 0, "num_predict": 8}
    answer = client.chat(MODEL, messages, options=options)
    assert answer.prompt_eval_count + 8 <= 256
    # As many as fit: with one turn more, they would not.
    kept = [
        [messages[0], *turns[begin:], *HELLO]
        for begin in range(0, 25, 2)
    ]  # fmt: skip
    counts = [
        httpx.post(server.url + "/tokenize", json={"messages": each}).json()["count"]
        for each in kept
    ]
    assert answer.prompt_eval_count == max(count for count in counts if count <= 248)
    body = {"model": MODEL, "messages": messages, "truncate": False}
    response = httpx.post(server.url + "/api/chat", json=body)
    assert response.status_code == 400 and response.json()["error"].startswith("messages: ")


# ---------------------------------------------------------------- vectors


def test_vectors_are_those_of_the_sibling_route(pooler: Server, server: Server) -> None:
    client = ollama.Client(pooler.url)
    texts = ["good cat", "bad dog"]
    body = {"input": texts}
    data = httpx.post(pooler.url + "/v1/embeddings", json=body).json()
    expected = [item["embedding"] for item in data["data"]]
    answer = client.embed(MODEL, texts)
    assert [list(vector) for vector in answer.embeddings] == expected
    assert answer.prompt_eval_count == data["usage"]["prompt_tokens"]
    assert list(client.embeddings(MODEL, texts[0]).embedding) == pytest.approx(expected[0])
    assert client.embed(MODEL, []).embeddings == []
    long = client.embed(MODEL, "cat " * 5000)
    assert len(long.embeddings[0]) == len(expected[0])
    with pytest.raises(ollama.ResponseError, match="input: ") as caught:
        client.embed(MODEL, "cat " * 5000, truncate=False)
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="/api/embed: this model does not serve it"):
        ollama.Client(server.url).embed(MODEL, texts)
    assert client.show(MODEL).capabilities == ["embedding"]


# ---------------------------------------------------------------- facts


def test_the_served_model_is_listed_and_shown(
    server: Server, client: ollama.Client, scripted: Server
) -> None:
    (listed,) = client.list().models
    (loaded,) = client.ps().models
    assert listed.model == loaded.model == f"{MODEL}:latest"
    assert listed.digest == loaded.digest and len(listed.digest) == 64
    folder = server.engine.model_config.path
    assert listed.size == sum(p.stat().st_size for p in folder.iterdir() if p.is_file())
    assert loaded.context_length == 256 and loaded.size_vram == 0
    shown = client.show(listed.model)
    config = server.engine.model_config
    assert shown.modelinfo[f"{config.hf_config.model_type}.context_length"] == 256
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.template == server.engine.tokenizer.chat_templates["default"]
    assert shown.details.family == config.hf_config.model_type
    others = ollama.Client(scripted.url).show(MODEL)
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(scripted.engine.model_config.path)
    assert others.modelinfo["general.parameter_count"] == model.num_parameters()
    assert client.pull(MODEL).status == "success"


def test_requests_without_a_prompt_say_that_the_model_is_loaded(client: ollama.Client) -> None:
    assert client.chat(MODEL, []).done_reason == "load"
    assert client.generate(MODEL).done_reason == "load"
    for kept in (0, "0s"):
        with pytest.raises(ollama.ResponseError, match="keep_alive: 0 would unload"):
            client.generate(MODEL, keep_alive=kept)


def test_clients_see_that_a_server_runs(server: Server, scripted: Server) -> None:
    assert httpx.get(server.url + "/").text == "Jackfield is running"
    for url in (server.url, scripted.url):
        for path in ("/", "/api/tags", "/api/version"):
            assert httpx.head(url + path).status_code == 200
        version = httpx.get(url + "/api/version").json()["version"]
        assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # What Copilot asks for.


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("route", "body", "status", "says"),
    [
        ("chat", {"model": "none"}, 404, "model 'none' not found: "),
        ("show", {"model": "none:latest"}, 404, "model 'none' not found: "),
        ("pull", {"model": "llama3"}, 404, "model 'llama3' not found: "),
        ("chat", {}, 400, "Object missing required field `model`"),
        ("chat", {"options": {"temperature": "warm"}}, 400, "options.temperature: "),
        ("chat", {"options": {"temperature": -1}}, 400, "options.temperature must be"),
        ("chat", {"options": {"top_p": 2}}, 400, "options.top_p must be"),
        ("chat", {"options": {"repeat_penalty": -1}}, 400, "options.repeat_penalty must be"),
        ("chat", {"options": {"num_predict": 0}}, 400, "options.num_predict: "),
        ("chat", {"options": {"mirostat": 2}}, 400, "options.mirostat: is not supported"),
        ("chat", {"options": {"tfs_z": 0.5}}, 400, "options.tfs_z: is not supported"),
        ("chat", {"options": {"numpredict": 5}}, 400, "unknown field `numpredict`"),
        ("chat", {"format": "xml"}, 400, "format: must be json or a JSON schema"),
        ("chat", {"format": {"type": 7}}, 400, "format: "),
        ("chat", {"think": "much"}, 400, "think: must be true, false, or one of"),
        ("chat", {"top_logprobs": 21}, 400, "top_logprobs: must be between 0 and 20"),
        ("chat", {"keep_alive": "soon"}, 400, "keep_alive: must be seconds, or a duration"),
        ("chat", {"keep_alive": "ms" * 5000}, 400, "keep_alive: must be seconds"),
        ("chat", {"tools": [{"function": {}}]}, 400, "tools"),
        ("chat", {"messages": [{"role": "god"}]}, 400, "messages[0].role: must be one of"),
        ("chat", {"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content: "),
        ("chat", {"messages": [{"role": "user", "content": "", "images": ["aa"]}]}, 400,
         "messages[0].images[0]: 'image' parts are not supported"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f",
         "arguments": "{}"}}]}]}, 400, "messages[0].tool_calls[0].function.arguments: must be"),
        ("generate", {"prompt": "a", "images": ["aa"]}, 400,
         "images[0]: 'image' parts are not supported"),
        ("generate", {"prompt": "a", "images": [1]}, 400, "images[0]: must be a picture in"),
        ("generate", {"prompt": "a", "images": ["aa"], "raw": True}, 400, "images: needs raw"),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix: is not supported"),
        ("generate", {"prompt": "a", "template": "b"}, 400, "template: is not supported"),
        ("generate", {"prompt": "a", "context": [1]}, 400, "context: is not supported"),
        ("generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "system: needs raw=false"),
        ("generate", {"prompt": "word " * 900, "raw": True}, 400, "prompt: "),
        ("generate", {"prompt": "word " * 900, "truncate": False}, 400, "prompt: "),
        ("copy", {}, 404, "POST /api/copy: Not Found (this server has one model; "),
    ],
)  # fmt: skip
def test_errors_are_ollama_s(server: Server, route: str, body: Any, status: int, says: str) -> None:
    if body and route == "chat":
        body = {"model": MODEL, "messages": HELLO, **body}
    elif route == "generate":
        body = {"model": MODEL, **body}
    response = httpx.post(f"{server.url}/api/{route}", json=body)
    assert response.status_code == status, response.text
    error = response.json()
    assert list(error) == ["error"] and says in error["error"], error


def test_values_without_effect_are_taken(client: ollama.Client) -> None:
    """What desktop programs send with every request."""
    options = {
        "num_ctx": 32768, "num_gpu": 99, "num_batch": 512, "use_mmap": True, "num_keep": 24,
        "typical_p": 1.0, "tfs_z": 1, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
        "repeat_last_n": 64, "penalize_newline": True, "num_predict": 2.0, "top_k": -1,
    }  # fmt: skip
    answer = client.chat(MODEL, HELLO, options=options, keep_alive=-1, tools=[])
    assert answer.eval_count == 2


def test_a_stream_that_fails_ends_with_a_line_of_the_error(
    server: Server, client: ollama.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jackfield.core.errors import RequestFailed
    from jackfield.entrypoints.ollama import request

    lines = request.Reply.lines

    def failing(self: request.Reply, output: Any) -> Any:
        if output.finished:
            raise RequestFailed("the worker has failed")
        return lines(self, output)

    monkeypatch.setattr(request.Reply, "lines", failing)
    stream = client.chat(MODEL, HELLO, options=GREEDY, stream=True)
    with pytest.raises(ollama.ResponseError, match="the worker has failed"):
        list(stream)
