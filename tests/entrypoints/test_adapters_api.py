"""Adapters over HTTP: as models of every route, loaded and unloaded, and whose they are."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from adapters_made import LINEAR, adapted_model, make_adapter
from serving import MODEL, Server, engine_config, running, save_random

from jackfield.core.config.adapter_options import LoRAModule
from jackfield.core.tenancy import TenantLimits
from jackfield.entrypoints.cli.main import main
from jackfield.entrypoints.http.auth.api_keys import PREFIX, digest_of, read_keys
from jackfield.entrypoints.http.options import BatchOptions, ServerOptions
from jackfield.entrypoints.server.serve_settings import settings

NAMES = ("first", "second", "third")
PROMPT = "The quick brown fox"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
ENGINE: dict[str, Any] = {
    "dtype": "float32", "enable_lora": True, "max_loras": 2, "max_cpu_loras": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters by NAMES."""
    folder = tmp_path_factory.mktemp("adapters")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    for seed, name in enumerate(NAMES):
        make_adapter(model, folder / name, seed=seed, target_modules=LINEAR)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path, folder: Path, tmp_path_factory: Any) -> Iterator[Server]:
    """Without keys: `first` is there from the start, `third` is found by its name."""
    found = tmp_path_factory.mktemp("found")
    make_adapter(
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint), found / "found", seed=9,
        target_modules=["q_proj"],
    )  # fmt: skip
    config = engine_config(
        checkpoint,
        lora_modules=(f"first={folder / 'first'}",),
        lora_resolver_cache_dir=str(found),
        **ENGINE,
    )
    batches = BatchOptions(tmp_path_factory.mktemp("batches"))
    with running(config, ServerOptions(enable_admin=True, batches=batches)) as running_server:
        yield running_server


def client(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def load(server: Server, name: str, path: Path | str, key: str = "none", **body: Any) -> Any:
    return httpx.post(
        server.url + "/v1/load_lora_adapter",
        json={"lora_name": name, "lora_path": str(path), **body},
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
    )


def unload(server: Server, name: str, key: str = "none") -> Any:
    return httpx.post(
        server.url + "/v1/unload_lora_adapter",
        json={"lora_name": name},
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
    )


def greedy(checkpoint: Path, adapter: Path | None, prompt: list[int], number: int) -> list[int]:
    """Return PEFT's tokens."""
    if adapter is None:
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    else:
        model = adapted_model(checkpoint, adapter)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(number):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_an_adapter_s_name_as_the_model_gives_pefts_tokens(
    server: Server, checkpoint: Path, folder: Path
) -> None:
    for model, adapter in ((MODEL, None), ("first", folder / "first")):
        completion = client(server).completions.create(
            model=model, prompt=PROMPT, temperature=0, max_tokens=8,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        choice: Any = completion.choices[0]
        assert completion.model == model
        assert choice.token_ids == greedy(checkpoint, adapter, choice.prompt_token_ids, 8)


def test_adapters_are_loaded_used_replaced_and_unloaded(
    server: Server, checkpoint: Path, folder: Path
) -> None:
    answer = load(server, "second", folder / "second")
    assert (answer.status_code, answer.text) == (
        200, "Success: LoRA adapter 'second' added successfully.",
    )  # fmt: skip
    assert "text/plain" in answer.headers["Content-Type"]
    models = {model.id: model for model in client(server).models.list()}
    assert {MODEL, "first", "second"} <= models.keys()
    card = models["second"].to_dict()
    assert card["parent"] == MODEL and card["root"] == str(folder / "second")

    def tokens() -> Any:
        completion = client(server).completions.create(
            model="second", prompt=PROMPT, temperature=0, max_tokens=8,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        return completion.choices[0].to_dict()

    choice = tokens()
    prompt = choice["prompt_token_ids"]
    assert choice["token_ids"] == greedy(checkpoint, folder / "second", prompt, 8)
    twice = load(server, "second", folder / "third")
    assert twice.status_code == 400 and "load_inplace" in twice.json()["error"]["message"]
    assert load(server, "second", folder / "third", load_inplace=True).status_code == 200
    assert tokens()["token_ids"] == greedy(checkpoint, folder / "third", prompt, 8)
    gone = unload(server, "second")
    assert gone.text == "Success: LoRA adapter 'second' removed successfully."
    with pytest.raises(openai.NotFoundError):
        tokens()
    assert unload(server, "second").json()["error"]["type"] == "NotFoundError"


# ---------------------------------------------------------------- every route


def bodies(model: str) -> dict[str, dict[str, Any]]:
    """Return a request of each route that has a model."""
    messages = [{"role": "user", "content": PROMPT}]
    short = {"model": model, "temperature": 0, "ignore_eos": True}
    return {
        "/v1/completions": {**short, "prompt": PROMPT, "max_tokens": 4},
        "/v1/chat/completions": {**short, "messages": messages, "max_tokens": 4},
        "/v1/responses": {**short, "input": PROMPT, "max_output_tokens": 4},
        "/v1/messages": {**short, "messages": messages, "max_tokens": 4},
        "/v1/messages/count_tokens": {"model": model, "messages": messages},
        "/v1/responses/input_tokens": {"model": model, "input": PROMPT},
        "/tokenize": {"model": model, "prompt": PROMPT},
        "/detokenize": {"model": model, "tokens": [5, 6]},
        "/api/chat": {
            "model": model,
            "messages": messages,
            "stream": False,
            "ignore_eos": True,
            "options": {"num_predict": 4, "temperature": 0},
        },
        "/api/generate": {
            "model": model,
            "prompt": PROMPT,
            "stream": False,
            "raw": True,
            "options": {"num_predict": 4, "temperature": 0},
        },
        "/api/embed": {"model": model, "input": PROMPT},
        "/v1/embeddings": {"model": model, "input": PROMPT},
        "/pooling": {"model": model, "input": PROMPT},
        "/classify": {"model": model, "input": PROMPT},
        "/score": {"model": model, "text_1": PROMPT, "text_2": PROMPT},
        "/rerank": {"model": model, "query": PROMPT, "documents": [PROMPT]},
    }


GENERATING = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat",
    "/api/generate",
)  # fmt: skip
POOLED = ("/api/embed", "/v1/embeddings", "/pooling", "/classify", "/score", "/rerank")


@pytest.mark.parametrize("route", bodies(""))
def test_each_route_takes_an_adapter_and_knows_no_other_name(route: str, server: Server) -> None:
    known = httpx.post(server.url + route, json=bodies("first")[route], timeout=60)
    if route in POOLED:  # The model generates: that is what is wrong then, not the name.
        assert known.status_code == 400 and "does not serve it" in known.text
    else:
        assert known.status_code == 200, known.text
    if route in GENERATING:
        assert known.json()["model"] == "first"
        base = httpx.post(server.url + route, json=bodies(MODEL)[route], timeout=60)
        names = ("choices", "output", "content", "message", "response")
        texts = [
            [str(answer.json()[name]) for name in names if name in answer.json()]
            for answer in (known, base)
        ]
        assert texts[0] and texts[0] != texts[1]
    for name in ("nobody", "FIRST", "first/", "../first", "x" * 300, "a\nb", ""):
        unknown = httpx.post(server.url + route, json=bodies(name)[route], timeout=60)
        assert unknown.status_code == 404, (name, unknown.text)
        assert "is not served here (there is: tiny)" in unknown.text


@pytest.mark.parametrize("route", GENERATING)
def test_streams_echo_the_adapter_s_name(route: str, server: Server) -> None:
    for name, status in (("first", 200), ("nobody", 404)):
        body = {**bodies(name)[route], "stream": True}
        answer = httpx.post(server.url + route, json=body, timeout=60)
        assert answer.status_code == status
        assert ('"model":"first"' in answer.text) == (status == 200)


def test_official_clients_use_adapters(server: Server) -> None:
    import anthropic  # Late: every process collects this file.

    messages: Any = [{"role": "user", "content": PROMPT}]
    chat = client(server).chat.completions.create(model="first", messages=messages, **GREEDY)
    assert chat.model == "first" and chat.usage is not None
    response = client(server).responses.create(
        model="first", input=PROMPT, temperature=0, max_output_tokens=16
    )
    assert response.model == "first"
    item = client(server).responses.create(
        model=MODEL, input="And?", previous_response_id=response.id, max_output_tokens=16
    )
    assert item.model == MODEL
    back = client(server).responses.create(
        model="first", input="And?", previous_response_id=item.id, max_output_tokens=16
    )
    assert back.model == "first"
    with pytest.raises(openai.NotFoundError):
        client(server).responses.create(
            model="nobody", input="And?", previous_response_id=item.id, max_output_tokens=16
        )
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    message = claude.messages.create(model="first", messages=messages, max_tokens=4)
    assert message.model == "first"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="nobody", messages=messages, max_tokens=4)
    assert client(server).models.retrieve("first").id == "first"
    with pytest.raises(openai.NotFoundError):
        client(server).models.retrieve("nobody")


def test_lines_of_a_batch_use_adapters(server: Server) -> None:
    api = client(server)
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions",
         "body": bodies(name)["/v1/completions"]}
        for name in (MODEL, "first", "nobody")
    ]  # fmt: skip
    content = "\n".join(map(json.dumps, lines)).encode()
    file = api.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = api.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    while batch.status not in ("completed", "failed"):
        batch = api.batches.retrieve(batch.id)
    assert batch.output_file_id is not None and batch.error_file_id is not None
    answers = {
        line["custom_id"]: line["response"]["body"]
        for line in map(json.loads, api.files.content(batch.output_file_id).text.splitlines())
    }
    assert {name: answer["model"] for name, answer in answers.items()} == {
        MODEL: MODEL, "first": "first",
    }  # fmt: skip
    texts = {answer["choices"][0]["text"] for answer in answers.values()}
    assert len(texts) == 2
    [line] = map(json.loads, api.files.content(batch.error_file_id).text.splitlines())
    assert line["custom_id"] == "nobody" and line["response"]["status_code"] == 404


def test_resolvers_and_sglang_s_names_find_adapters(server: Server) -> None:
    answers = {
        name: httpx.post(
            server.url + "/v1/completions", json=bodies(name)["/v1/completions"], timeout=60
        ).json()
        for name in (MODEL, "found", f"{MODEL}:first", "first")
    }
    texts = {name: answer["choices"][0]["text"] for name, answer in answers.items()}
    assert texts["found"] != texts[MODEL] != texts["first"] == texts[f"{MODEL}:first"]
    assert answers[f"{MODEL}:first"]["model"] == f"{MODEL}:first"
    assert "found" in {model.id for model in client(server).models.list()}
    assert httpx.get(server.url + f"/v1/models/{MODEL}:nobody").status_code == 404
    for route, body in bodies(MODEL).items():
        refused = httpx.post(server.url + route, json={**body, "lora_path": "first"}, timeout=60)
        assert refused.status_code == 400 and "the request's model" in refused.text


def test_vectors_and_scores_are_those_of_the_adapter(checkpoint: Path, folder: Path) -> None:
    options: dict[str, Any] = {
        "runner": "pooling",
        "lora_modules": (f"first={folder / 'first'}",),
        **ENGINE,
    }
    models = {
        MODEL: transformers.AutoModelForCausalLM.from_pretrained(checkpoint),
        "first": adapted_model(checkpoint, folder / "first"),
    }
    with running(engine_config(checkpoint, **options)) as server:
        ids, other = (
            httpx.post(
                server.url + "/tokenize", json={"model": "first", "prompt": text}, timeout=60
            ).json()["tokens"]
            for text in (PROMPT, "Hello")
        )
        for name, model in models.items():
            with torch.no_grad():
                expected, second = (
                    torch.nn.functional.normalize(
                        model(torch.tensor([tokens]), output_hidden_states=True)
                        .hidden_states[-1][0, -1]
                        .float(),
                        dim=0,
                    )
                    for tokens in (ids, other)
                )
            answer = client(server).embeddings.create(model=name, input=PROMPT)
            assert answer.model == name
            torch.testing.assert_close(
                torch.tensor(answer.data[0].embedding), expected, atol=1e-4, rtol=0
            )
            body = {"model": name, "text_1": PROMPT, "text_2": "Hello"}
            score = httpx.post(server.url + "/score", json=body, timeout=60).json()
            assert score["model"] == name
            assert score["data"][0]["score"] == pytest.approx(float(expected @ second), abs=1e-4)
            body = {"model": name, "query": PROMPT, "documents": ["Hello"]}
            ranked = httpx.post(server.url + "/rerank", json=body, timeout=60).json()
            assert ranked["results"][0]["relevance_score"] == pytest.approx(
                float(expected @ second), abs=1e-4
            )


# ---------------------------------------------------------------- flags


def test_flags_and_files_name_adapters(tmp_path: Path) -> None:
    spelled = ["a=/x/a", '{"name": "b", "path": "/x/b", "base_model_name": "c", "pinned": true}']
    expected = (LoRAModule("a", "/x/a"), LoRAModule("b", "/x/b", "c", True))
    file = tmp_path / "serve.yaml"
    file.write_text(
        "enable-lora: true\nmax_loras: 3\nlora-modules:\n- a=/x/a\n"
        "- {name: b, path: /x/b, base_model_name: c, pinned: true}\n"
    )
    flags = ["--enable-lora", "--max-loras", "3", "--lora-modules", *spelled]
    for argv in (flags, ["--config", str(file)]):
        config = settings(["model", *argv]).config
        assert (config.lora_modules, config.max_loras) == (expected, 3)


def test_a_key_s_rights_are_written_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("secret"))
    flags = ["--adapter", "a", "--adapter", "b", "--adapter-folder", "/x", "--max-adapters", "2"]
    file = tmp_path / "keys.jsonl"
    assert main(["keys", "add", "ann", "--file", str(file), *flags, "--manages-adapters"]) == 0
    [key] = read_keys(file)
    assert key.tenant.limits == TenantLimits(
        adapters=("a", "b"), adapter_folder="/x", max_adapters=2, manages_adapters=True
    )


# ---------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("name", "path", "kind", "says"),
    [
        (MODEL, "first", "InvalidUserInput", "is the base model's name"),
        ("first", "first", "InvalidUserInput", "load_inplace"),
        ("a\nb", "first", "InvalidUserInput", "not printable"),
        ("x" * 257, "first", "InvalidUserInput", "1 to 256 characters"),
        ("", "first", "InvalidUserInput", "lora_name"),
        (None, "first", "InvalidUserInput", "lora_name"),
        ("new", "", "InvalidUserInput", "lora_path"),
        ("new", "x" * 5000, "InvalidUserInput", "lora_path"),
        ("new", "a\0b", "NotFoundError", "no adapter is at"),
        ("new", "nowhere", "NotFoundError", "no adapter is at"),
        ("new", "~nobody-here/x", "NotFoundError", "no adapter is at"),
        ("new", "/dev/zero", "NotFoundError", "/dev/zero"),
        ("new", "pipe", "NotFoundError", "pipe"),
        ("new", "piped", "InvalidUserInput", "not a regular file"),
        ("new", "cut", "InvalidUserInput", "adapter_model.safetensors"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(
    name: Any, path: str, kind: str, says: str, server: Server, folder: Path
) -> None:
    if not (folder / "pipe").exists():
        os.mkfifo(folder / "pipe")
        for broken in ("piped", "cut"):
            (folder / broken).mkdir()
            config = (folder / "first" / "adapter_config.json").read_text()
            (folder / broken / "adapter_config.json").write_text(config)
        os.mkfifo(folder / "piped" / "adapter_model.safetensors")
        weights = (folder / "first" / "adapter_model.safetensors").read_bytes()
        (folder / "cut" / "adapter_model.safetensors").write_bytes(weights[:-9])
    body = {"lora_name": name, "lora_path": str(folder / path) if path else path}
    answer = httpx.post(server.url + "/v1/load_lora_adapter", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (
        404 if kind == "NotFoundError" else 400, kind,
    ), error  # fmt: skip
    assert says in error["message"] and len(error["message"]) < 6000
    assert "new" not in {model.id for model in client(server).models.list()}


def test_sglang_s_routes_say_what_is_loaded(server: Server, folder: Path) -> None:
    body = {"lora_name": "third", "lora_path": str(folder / "third"), "pinned": True}
    answer = httpx.post(server.url + "/load_lora_adapter", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["loaded_adapters"]["third"] == str(folder / "third")
    again = httpx.post(server.url + "/load_lora_adapter", json=body, timeout=60)
    assert again.status_code == 400 and "third" in again.json()["error_message"]
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    for path in ("/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert paths[path]["post"]["requestBody"] and "403" in paths[path]["post"]["responses"]
    gone = httpx.post(server.url + "/unload_lora_adapter", json={"lora_name": "third"}, timeout=60)
    assert gone.json()["success"] and "third" not in gone.json()["loaded_adapters"]


def test_without_admin_or_adapters_there_are_no_routes(checkpoint: Path, folder: Path) -> None:
    cases = ((ENGINE, ServerOptions()), ({}, ServerOptions(enable_admin=True)))
    for engine, options in cases:
        with running(engine_config(checkpoint, **engine), options) as server:
            assert load(server, "first", folder / "first").status_code == 404
            assert unload(server, "first").status_code == 404
            if engine:
                continue
            unknown = httpx.post(
                server.url + "/v1/completions", json=bodies("first")["/v1/completions"]
            )
            assert unknown.json()["error"]["code"] == "model_not_found"


# ---------------------------------------------------------------- tenants


def key_line(name: str, **rights: Any) -> str:
    return json.dumps({"name": name, "digest": PREFIX + digest_of(name).hex(), **rights})


@pytest.fixture(scope="module")
def keyed(checkpoint: Path, folder: Path, tmp_path_factory: Any) -> Iterator[Server]:
    """`all` manages; `ann` and `bob` have folders, `ann` room for one; `few` may use `second`."""
    keys = tmp_path_factory.mktemp("keys") / "keys.jsonl"
    keys.write_text(
        "\n".join(
            [
                key_line("all", manages_adapters=True),
                key_line("ann", adapter_folder=str(folder), max_adapters=1),
                key_line("bob", adapter_folder=str(folder)),
                key_line("few", adapters=["second"]),
            ]
        )
    )
    config = engine_config(
        checkpoint,
        lora_modules=tuple(f"{name}={folder / name}" for name in ("first", "second")),
        **ENGINE,
    )
    options = ServerOptions(enable_admin=True, api_key_files=(keys,), api_keys=("plain",))
    with running(config, options) as server:
        yield server


def served(server: Server, key: str) -> dict[str, str]:
    """Return the adapters that a key sees, with their roots."""
    models = client(server, key).models.list()
    return {m.id: m.to_dict()["root"] for m in models if m.to_dict()["parent"]}  # type: ignore


def complete(server: Server, key: str, model: str) -> httpx.Response:
    return httpx.post(
        server.url + "/v1/completions",
        json=bodies(model)["/v1/completions"],
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
    )


def test_tenants_see_and_use_what_they_may(keyed: Server, folder: Path) -> None:
    paths = {name: str(folder / name) for name in ("first", "second")}
    assert served(keyed, "all") == served(keyed, "plain") == paths
    assert served(keyed, "ann") == {"first": "first", "second": "second"}
    assert served(keyed, "few") == {"second": "second"}
    assert complete(keyed, "few", "second").status_code == 200
    unknown, foreign = complete(keyed, "few", "nobody"), complete(keyed, "few", "first")
    assert foreign.status_code == 404
    assert foreign.text.replace("first", "nobody") == unknown.text
    for key in ("few", "stranger"):
        status = {"few": 403, "stranger": 401}[key]
        assert load(keyed, "new", folder / "third", key).status_code == status
        assert unload(keyed, "second", key).status_code == status


def test_an_adapter_of_a_tenant_s_own_is_nobody_else_s(keyed: Server, folder: Path) -> None:
    assert load(keyed, "mine", "third", "ann").status_code == 200
    assert load(keyed, "more", "third", "ann").status_code == 400  # Its one is there.
    assert served(keyed, "ann")["mine"] == "mine"
    for key in ("all", "bob", "few"):
        assert "mine" not in served(keyed, key)
        assert complete(keyed, key, "mine").status_code == 404
    assert complete(keyed, "ann", "mine").json()["model"] == "mine"
    # Another's of the same name is another adapter, and hides everyone's.
    everyones = complete(keyed, "bob", "first").json()["choices"]
    for name in ("mine", "first"):
        assert load(keyed, name, folder / "second", "bob").status_code == 200
    texts = {key: complete(keyed, key, "mine").json()["choices"] for key in ("ann", "bob")}
    assert texts["ann"] != texts["bob"]
    assert complete(keyed, "bob", "first").json()["choices"] != everyones
    assert complete(keyed, "ann", "first").json()["choices"] == everyones
    assert unload(keyed, "first", "ann").status_code == 404  # Everyone's.
    for name in ("mine", "first"):
        assert unload(keyed, name, "bob").status_code == 200
    assert complete(keyed, "bob", "first").json()["choices"] == everyones
    assert complete(keyed, "ann", "mine").status_code == 200
    assert unload(keyed, "mine", "ann").status_code == 200


def test_a_tenant_s_paths_stay_in_its_folder(keyed: Server, folder: Path, tmp_path: Path) -> None:
    outside = shutil.copytree(folder / "first", tmp_path / "outside")
    link = folder / "link"
    link.symlink_to(outside)
    up = os.path.relpath(outside, folder)
    for path in (str(outside), up, "link", f"{folder}/../{folder.name}/link", ".", "/etc", "a\0b"):
        answer = load(keyed, "new", path, "bob")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].startswith("lora_path: no adapter is at ")
    link.unlink()
    for name in ("empty", "e" * 250):
        (folder / name).mkdir()
        empty = load(keyed, "new", name, "bob")
        assert empty.status_code == 404 and str(folder) not in empty.text
