"""The OpenAPI document: whole, true to the handlers, and Schemathesis finds nothing against it."""

from __future__ import annotations

import collections
import inspect
import json
import os
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import forked
import httpx
import pytest
from aiohttp import web
from encoders import save_encoder, save_word_tokenizer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from serving import Server, running

from jackfield import AsyncEngine, EngineConfig, hookimpl
from jackfield.core.registry import Plugins, load_plugins
from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.openai.common.openapi import document, routes
from jackfield.entrypoints.server.app import make_app
from jackfield.entrypoints.server.docs_page import page

ALL = ServerOptions(enable_admin=True, enable_plugins_route=True, tokenizer_info=True)
"""With every route that a flag adds."""
SERVED = ServerOptions(enable_plugins_route=True, tokenizer_info=True)
"""The same without those that pause the engine, which examples would do."""
POOLING = ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank", "/v2/embed")
"""Routes of which a model that writes serves none."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    config = EngineConfig(
        served_model_name=("tiny",),
        reasoning_parser="think_tags",
        tool_call_parser="hermes",
        max_model_len=160,
        max_num_seqs=8,
        device="cpu",
    )
    with running(config, SERVED) as item:
        yield item


@pytest.fixture(scope="module")
def pooler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("encoder")
    save_word_tokenizer(folder)
    save_encoder(folder, "Bert")
    config = EngineConfig(model=str(folder), served_model_name=("tiny",), device="cpu")
    with running(config, SERVED) as item:
        yield item


@pytest.fixture(scope="module")
def served(server: Server) -> dict[str, Any]:
    response = httpx.get(server.url + "/openapi.json")
    assert response.headers["Content-Type"].startswith("application/json")
    return response.json()


def application(options: ServerOptions = ALL) -> web.Application:
    """Of an engine without plugins."""
    return make_app(AsyncEngine(EngineConfig(), plugins=Plugins()), options)


# ---------------------------------------------------------------- the document


def test_every_route_is_documented_or_internal() -> None:
    for method, path, handler in routes(application()):
        assert hasattr(handler, "openapi"), (
            f"{method} {path}: put @documented(...) or @internal "
            f"(entrypoints/openai/common/openapi.py) on {handler.__name__}"
        )


def test_what_a_handler_decodes_is_what_it_documents() -> None:
    seen, served = 0, document(application())
    for method, path, handler in routes(application()):
        match = re.search(r"await decode_body\(request, (\w+)\)", inspect.getsource(handler))
        if match is None or handler.openapi is None:
            continue
        seen += 1
        body = served["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]
        assert body["schema"] == {"$ref": f"#/components/schemas/{match[1]}"}, path
    assert seen > 20


def test_the_document_holds_together(served: dict[str, Any]) -> None:
    assert served["openapi"] == "3.1.0" and served["servers"] == [{"url": "/"}]
    references = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(served)))
    assert references == set(served["components"]["schemas"])
    operations = [o for methods in served["paths"].values() for o in methods.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names)) > 15
    for operation in operations:
        assert operation["summary"] and operation["tags"] and operation["responses"]
    chat = served["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["messages"] and "top_k" in chat["properties"]
    (parameter,) = served["paths"]["/v1/models/{name}"]["get"]["parameters"]
    assert (parameter["name"], parameter["in"]) == ("name", "path")


def test_keys_and_the_root_path_are_described() -> None:
    openapi = document(application(), root_path="/llm", keys=True)
    assert openapi["servers"] == [{"url": "/llm"}]
    assert openapi["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert openapi["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "401" in openapi["paths"]["/v1/models"]["get"]["responses"]
    assert "security" not in openapi["paths"]["/health"]["get"]
    assert "401" not in openapi["paths"]["/health"]["get"]["responses"]


class Greeting:
    """A plugin with a route that tells about itself, one that does not, and a hidden one."""

    name = "greeting"

    @hookimpl
    def register_routes(self, app: web.Application, engine: Any) -> None:
        async def hello(request: web.Request) -> web.Response:
            """Say hello"""
            return web.json_response("hello")

        async def told(request: web.Request) -> web.Response:
            return web.json_response({"greeting": "hello"})

        async def hidden(request: web.Request) -> web.Response:
            return web.json_response("psst")

        response = {"type": "object", "properties": {"greeting": {"type": "string"}}}
        told.openapi = {  # type: ignore[attr-defined]
            "summary": "Say hello, told",
            "responses": {
                "200": {"description": "", "content": {"application/json": {"schema": response}}}
            },
        }
        hidden.openapi = None  # type: ignore[attr-defined]
        app.router.add_get("/hello", hello)
        app.router.add_get("/told/{who}", told)
        app.router.add_get("/hidden", hidden)


def test_routes_of_plugins_are_listed() -> None:
    plugins = load_plugins()
    plugins.manager.register(Greeting())

    engine_config = document(make_app(AsyncEngine(EngineConfig(), plugins=plugins)))
    assert engine_config["paths"]["/hello"]["get"]["summary"] == "Say hello"
    assert engine_config["paths"]["/told/{who}"]["get"]["summary"] == "Say hello, told"
    assert engine_config["paths"]["/told/{who}"]["get"]["parameters"][0]["name"] == "who"
    assert "/hidden" not in engine_config["paths"] and "/docs" not in engine_config["paths"]
    assert "/told/{who}" in page(engine_config)


# ---------------------------------------------------------------- the page


class Links(HTMLParser):
    """Anchors, links, and anything else that a page could load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        attributes = dict(attrs)
        self.ids |= {attributes["id"]} if "id" in attributes else set()
        assert "src" not in attributes
        if "href" in attributes:
            self.links.append(attributes["href"])


def test_the_page_shows_all_and_asks_no_other_host(server: Server, served: dict[str, Any]) -> None:
    response = httpx.get(server.url + "/docs")
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    links = Links(response.text)
    for path in served["paths"]:
        assert f"<code>{path}</code>" in response.text
    assert links.ids == set(served["components"]["schemas"])
    assert {link for link in links.links if not link.startswith("#")} == {"openapi.json"}
    assert {link[1:] for link in links.links if link.startswith("#")} <= links.ids
    assert not links.tags & {"script", "link", "img", "iframe"}
    assert not re.search(r"https?://|url\(|@import", response.text)


def test_what_a_plugin_writes_is_escaped() -> None:
    openapi = document(application())
    openapi["paths"]["/<b>"] = {
        "get": {"tags": ["<i>"], "summary": "<script>", "responses": {"200": {}}}
    }
    assert not {"script", "i"} & Links(page(openapi)).tags


@pytest.mark.parametrize("docs", [True, False])
def test_both_are_served_without_a_key_and_can_be_turned_off(docs: bool) -> None:
    config = EngineConfig(max_model_len=64, device="cpu")
    with running(config, ServerOptions(api_keys=("key",), docs=docs)) as server:
        for path in ("/docs", "/openapi.json"):
            headers = {} if docs else {"Authorization": "Bearer key"}
            status = httpx.get(server.url + path, headers=headers).status_code
            assert status == (200 if docs else 404)
        assert httpx.get(server.url + "/v1/models").status_code == 401


# ---------------------------------------------------------------- Schemathesis


HOOKS = """
import schemathesis

@schemathesis.hook
def map_body(context, body):
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        return {**body, "model": "tiny"}
    return body
"""
"""Schemathesis cannot know which models are served, and would hear of nothing else."""


def command(server: Server, examples: int, folder: Path) -> None:
    """Its command: what every schema's corners are, then `examples` of its own for each route."""
    phases = "coverage,fuzzing" if examples else "coverage"
    (folder / "hooks.py").write_text(HOOKS)
    path = forked.python_path(folder)
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": path}
    completed = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json",
         "--phases", phases, "--generation-deterministic", "--no-color",
         "--max-examples", str(max(examples, 1)), "--suppress-health-check", "all",
         "--request-timeout", "300",
         # A schema does not say which prompts fit a model, nor which fields go together.
         "--exclude-checks", "positive_data_acceptance"],
        capture_output=True, text=True, cwd=folder, env=environment,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout[-6000:]
    match = re.search(r"(\d+) generated, (\d+) passed", completed.stdout)
    assert match is not None and match[1] == match[2] and int(match[1]) > 500, completed.stdout


@pytest.mark.slow
def test_schemathesis_finds_nothing(server: Server, tmp_path: Path) -> None:
    command(server, 0, tmp_path)


@pytest.mark.slow
def test_schemathesis_finds_nothing_in_many_examples(server: Server, tmp_path: Path) -> None:
    command(server, 200, tmp_path)


TEXT = st.text(max_size=12)
IDS = st.lists(st.integers(3, 59), min_size=1, max_size=8)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
PLAUSIBLE: dict[str, Any] = {
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(("user", "assistant", "system")), "content": TEXT}
        ),
        min_size=1,
        max_size=3,
    ),
    "prompt": TEXT | IDS | st.lists(TEXT, min_size=1, max_size=2),
    "input": TEXT | IDS | st.lists(TEXT, min_size=1, max_size=3),
    "tokens": IDS,
    "query": TEXT,
    "text_1": TEXT,
    "text_2": TEXT | st.lists(TEXT, min_size=1, max_size=3),
    "documents": st.lists(TEXT, min_size=1, max_size=3),
    "texts": st.lists(TEXT, min_size=1, max_size=3),
    "model": st.sampled_from(("tiny", None)),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(-1, 20),
    "min_p": st.floats(0, 1),
    "seed": st.integers(0, 2**40),
    "stop": TEXT | st.lists(TEXT, max_size=2),
    "logit_bias": st.dictionaries(st.integers(0, 99).map(str), st.floats(-50, 50), max_size=3),
    "response_format": st.sampled_from(({"type": "text"}, {"type": "json_object"})),
    "guided_regex": st.just("[ab]{1,3}"),
    "guided_choice": st.just(["yes", "no"]),
    "structured_outputs": st.just({"json": CITY}),
    "tools": st.just([{"type": "function", "function": {"name": "look", "parameters": CITY}}]),
    "tool_choice": st.sampled_from(("auto", "none", "required")),
    "logprobs": st.booleans() | st.integers(0, 3),
    "top_logprobs": st.integers(0, 3),
    "prompt_logprobs": st.integers(0, 2),
    "truncate_prompt_tokens": st.integers(-1, 8),
    "encoding_format": st.sampled_from(("float", "base64")),
    "dimensions": st.integers(1, 8),
    "task": st.sampled_from(("embed", "token_embed", "score")),
    "top_n": st.integers(0, 3),
    "chat_template_kwargs": st.fixed_dictionaries({"enable_thinking": st.booleans()}),
    "request_id": st.text("ab1-", min_size=1, max_size=9),
}
"""Values that most requests have; the other fields come as Schemathesis makes them."""
GIVEN = ("prompt", "input", "text_1", "text_2", "texts")
"""What a request is about, where none of its fields is required."""
FLAGS = ("echo", "ignore_eos", "return_token_ids", "include_reasoning", "continue_final_message",
         "add_generation_prompt", "return_token_strs", "return_documents", "normalize",
         "skip_special_tokens", "include_stop_str_in_output")  # fmt: skip
PLAUSIBLE |= dict.fromkeys(FLAGS, st.booleans())


def shaped(draw: Any, body: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A request that is likely to be answered: plausible values, at most one wild one."""
    fields = schema["properties"]
    likely = [name for name in fields if name in PLAUSIBLE]
    if "instruction" in fields:  # No chat template joins the texts.
        likely.remove("chat_template_kwargs")
    wild = [name for name in body if name not in PLAUSIBLE and name in fields]
    names = [*schema["required"], *(n for n in GIVEN if n in fields)]
    names += draw(st.lists(st.sampled_from(likely), max_size=5))
    result = {name: draw(PLAUSIBLE[name]) for name in names}
    if "messages" in result:  # In place of the other one, where there are both.
        result = {k: v for k, v in result.items() if k not in ("prompt", "input")}
    result |= {name: body[name] for name in draw(st.lists(st.sampled_from(wild), max_size=1))} if (
        wild and draw(st.booleans())
    ) else {}  # fmt: skip
    if "max_tokens" in fields:
        result["max_tokens"] = draw(st.integers(1, 5))
    return result


def undocumented(value: Any, schema: dict[str, Any], components: dict[str, Any]) -> set[str]:
    """Keys of an answer that its schema does not know."""
    if "$ref" in schema:
        return undocumented(value, components[schema["$ref"].rpartition("/")[2]], components)
    if "anyOf" in schema:
        return min((undocumented(value, first, components) for first in schema["anyOf"]), key=len)
    if isinstance(value, list) and "items" in schema:
        return set().union(*(undocumented(first, schema["items"], components) for first in value))
    if not isinstance(value, dict) or "properties" not in schema:
        return set()
    known = schema["properties"]
    unknown = {key for key in value if key not in known}
    return unknown.union(
        *(undocumented(part, known[key], components) for key, part in value.items() if key in known)
    )


def check_shape(response: Any, operation: dict[str, Any], openapi: dict[str, Any]) -> None:
    """No key that is not documented, and every event as documented."""
    components = openapi["components"]["schemas"]
    content = operation["responses"]["200"]["content"]
    if response.headers["content-type"][0] == "application/x-ndjson":
        for line in response.text.splitlines():
            schema = content["application/x-ndjson"]["schema"]
            assert not undocumented(json.loads(line), schema, components), line
        return
    if not response.headers["content-type"][0].startswith("text/event-stream"):
        schema = content["application/json"]["schema"]
        assert not undocumented(response.json(), schema, components)
        return
    event_schema, _ = content["text/event-stream"]["schema"]["anyOf"]
    schema = event_schema["properties"]["data"]["contentSchema"]
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        event = json.loads(line.removeprefix("data: "))
        assert not undocumented(event, schema, components), event


def guided(server: Server, examples: int, paths: tuple[str, ...] | None = None) -> dict[str, int]:
    """Requests that get through, a route each that takes a body; → route → answers with 200."""
    schemathesis = pytest.importorskip("schemathesis")  # Late: every process collects this file.

    openapi = httpx.get(server.url + "/openapi.json").json()
    answered: collections.Counter[str] = collections.Counter()
    for described in schemathesis.openapi.from_dict(openapi).get_all_operations():
        operation = described.ok()
        path = operation.path
        raw = openapi["paths"][path][operation.method]
        if "requestBody" not in raw or (paths is not None and path not in paths):
            continue
        content = raw["requestBody"]["content"]
        if "application/json" not in content:
            continue
        reference = content["application/json"]["schema"]["$ref"]
        schema = openapi["components"]["schemas"][reference.rpartition("/")[2]]
        if any(name not in PLAUSIBLE for name in schema["required"]):
            continue

        answered[path] += _ask(server, operation, raw, schema, openapi, examples)
    return answered


def _ask(server: Server, operation: Any, raw: Any, schema: Any, openapi: Any, examples: int) -> int:
    """→ how many requests to one operation were answered with 200"""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    expected = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
    ]
    count = 0

    @given(case=operation.as_strategy(), data=st.data())
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    def send_case(case: Any, data: Any) -> None:
        nonlocal count
        body = case.body if isinstance(case.body, dict) else {}
        case.body = shaped(data.draw, body, schema)
        response = case.call(base_url=server.url, timeout=300)
        case.validate_response(response, checks=expected)
        if response.status_code == 200:
            count += 1
            check_shape(response, raw, openapi)

    send_case()
    return count


def test_answers_have_the_documented_shape(server: Server, pooler: Server) -> None:
    answered = guided(server, 4)
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert answered[path] >= 2, answered
    answered = guided(pooler, 6, POOLING)
    for path in set(POOLING) - {"/classify"}:
        assert answered[path] >= 1, answered


@pytest.mark.slow
def test_many_answers_have_the_documented_shape(server: Server, pooler: Server) -> None:
    guided(server, 200)
    guided(pooler, 100, POOLING)


def test_a_name_of_nothing_is_answered_as_documented(server: Server) -> None:
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    named = [(method, path) for path in paths if "{" in path for method in paths[path]]
    assert ("delete", "/v1/responses/{response_id}") in named
    for method, path in named:
        response = httpx.request(method, server.url + re.sub(r"{\w+}", "0", path))
        assert str(response.status_code) in paths[path][method]["responses"], (method, path)


def test_names_of_models_may_hold_anything(server: Server) -> None:
    for name in ("a/b", "..", "%00", "é", "{name}"):
        response = httpx.get(f"{server.url}/v1/models/{urllib.parse.quote(name, safe='')}")
        assert response.status_code == 404 and response.json()["error"]["type"] == (
            "invalid_request_error" if name == ".." else "not_found_error"
        ), name
