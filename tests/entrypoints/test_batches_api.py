"""/v1/files and /v1/batches with the real openai client, over restarts too."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import httpx
import msgspec
import openai
import pytest
from aiohttp import web
from serving import MODEL, Server, engine_config, running, save_random

from jackfield import AsyncEngine, EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.entrypoints.cli.main import main
from jackfield.entrypoints.http.options import BatchOptions, ServerOptions
from jackfield.entrypoints.server.app import make_app

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
KEY = "secret"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server(checkpoint: Path, folder: Path) -> Iterator[Server]:
    options = ServerOptions(
        api_keys=(KEY,),
        max_body_bytes=20_000,
        batches=BatchOptions(folder, max_file_bytes=200_000, max_store_bytes=2_000_000),
    )
    config = engine_config(checkpoint, device="cpu", scheduling_policy="priority")
    with running(config, options) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as api_client:
        yield api_client


def line(custom_id: str, url: str = COMPLETE, **body: Any) -> dict[str, Any]:
    if url == COMPLETE:
        body = {"prompt": custom_id, "max_tokens": 4, "seed": 1, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: list[Any]) -> bytes:
    return "".join(
        (first if isinstance(first, str) else json.dumps(first)) + "\n" for first in lines
    ).encode()


def upload(client: openai.OpenAI, lines: list[Any], **options: Any) -> Any:
    return client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch", **options)


def start(client: openai.OpenAI, lines: list[Any], url: str = COMPLETE, **options: Any) -> Any:
    options = {"completion_window": "24h", **options}
    return client.batches.create(
        input_file_id=upload(client, lines).id,
        endpoint=url,
        **options,  # type: ignore[arg-type]
    )


def until(
    client: openai.OpenAI, batch_id: str, *statuses: str, completed: int = 0, seconds: float = 300
) -> Any:
    """The batch once its status is one of these and so many requests are done."""
    deadline = time.monotonic() + seconds
    while True:
        batch = client.batches.retrieve(batch_id)
        if batch.status in statuses and batch.request_counts.completed >= completed:
            return batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(item) for item in client.files.content(file_id).text.splitlines()]


LONG = {"max_tokens": 400, "ignore_eos": True, "n": 4}


# ---------------------------------------------------------------- files


def test_a_file_is_stored_listed_read_and_deleted(client: openai.OpenAI) -> None:
    content = jsonl([line("a"), line("b")])
    file = client.files.create(file=("../../etc/été.jsonl", io.BytesIO(content)), purpose="batch")
    assert (file.object, file.purpose, file.status) == ("file", "batch", "processed")
    assert file.filename == "été.jsonl" and file.bytes == len(content)
    assert abs(file.created_at - time.time()) < 60
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == content
    assert file in client.files.list(purpose="batch").data
    assert client.files.list(purpose="other").data == []
    deleted = client.files.delete(file.id)
    assert deleted.deleted and deleted.id == file.id
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            gone(file.id)


def test_files_are_listed_in_pages(client: openai.OpenAI) -> None:
    file_ids = [upload(client, [line(str(number))]).id for number in range(5)]
    newest = [file.id for file in client.files.list(limit=2)]  # The client turns the pages.
    assert newest[:5] == file_ids[::-1]
    first = client.files.list(limit=2, order="asc", after=file_ids[0])
    assert [file.id for file in first.data] == file_ids[1:3] and first.has_more
    with pytest.raises(openai.BadRequestError, match="limit: must be from 1 to 10000"):
        client.files.list(limit=0)
    with pytest.raises(openai.NotFoundError, match="after"):
        client.files.list(after="file-none")


def test_what_is_uploaded_and_answered_is_for_the_server_s_user_alone(
    client: openai.OpenAI, folder: Path
) -> None:
    final = until(client, start(client, [line("a")]).id, "completed")
    for file_id in (final.input_file_id, final.output_file_id):
        assert (folder / "files" / file_id).stat().st_mode & 0o777 == 0o600


def test_a_file_expires(client: openai.OpenAI, folder: Path) -> None:
    after: Any = {"anchor": "created_at", "seconds": 3600}
    file = upload(client, [line("a")], expires_after=after)
    assert file.expires_at == file.created_at + 3600
    with sqlite3.connect(folder / "batches.sqlite3") as db:
        db.execute("UPDATE files SET expires_at = 1 WHERE id = ?", (file.id,))
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    assert not (folder / "files" / file.id).exists()
    after["seconds"] = 1
    with pytest.raises(openai.BadRequestError, match="seconds: must be from 3600"):
        upload(client, [line("a")], expires_after=after)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"data": {"purpose": "batch"}, "files": {"other": b"x"}}, "file: is missing"),
        ({"data": {"purpose": "batch"}, "files": {"file": b""}}, "file: is empty"),
        ({"data": {"purpose": "vision"}, "files": {"file": b"x"}}, "purpose: must be batch"),
        ({"files": {"file": b"x"}}, "purpose: must be batch, got None"),
        ({"data": {"purpose": "b" * 5000}, "files": {"file": b"x"}}, "purpose: is too long"),
        ({"data": {"purpose": "batch"}, "files": {"file": b"x" * 300_000}}, "larger than 200000"),
        ({"data": {"purpose": "batch"}, "files": {"file": b"x" * 3_000_000}}, "2000000 bytes at"),
        ({"json": {"purpose": "batch"}}, "must be multipart/form-data"),
        (
            {"content": b"nonsense", "headers": {"Content-Type": "multipart/form-data"}},
            "multipart/form-data",
        ),
        (
            {
                "content": b"nonsense",
                "headers": {"Content-Type": "multipart/form-data; boundary=x"},
            },
            "form",
        ),
    ],
)
def test_an_upload_that_is_wrong_is_refused_and_leaves_nothing(
    form: dict[str, Any], message: str, server: Server, folder: Path
) -> None:
    before = sorted((folder / "files").iterdir())
    headers = {"Authorization": f"Bearer {KEY}", **form.pop("headers", {})}
    response = httpx.post(server.url + "/v1/files", headers=headers, **form)
    assert response.status_code == 400 and message in response.json()["error"]["message"]
    assert list((folder / "incoming").iterdir()) == []
    assert sorted((folder / "files").iterdir()) == before


@pytest.mark.parametrize(
    "name", ["..%2F..%2Fbatches.sqlite3", "%2e%2e", "..%2flock", "%00", "file-x'--", "a" * 3000]
)
def test_no_id_reaches_a_path(name: str, server: Server) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    for method, route in (
        ("GET", f"/v1/files/{name}"),
        ("GET", f"/v1/files/{name}/content"),
        ("DELETE", f"/v1/files/{name}"),
        ("GET", f"/v1/batches/{name}"),
        ("POST", f"/v1/batches/{name}/cancel"),
    ):
        response = httpx.request(method, server.url + route, headers=headers)
        assert response.status_code == 404, (method, route)
        assert response.json()["error"]["message"]


def test_every_route_needs_the_key(server: Server) -> None:
    for method, route in (
        ("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/files/x"),
        ("GET", "/v1/files/x/content"), ("DELETE", "/v1/files/x"), ("GET", "/v1/batches"),
        ("POST", "/v1/batches"), ("GET", "/v1/batches/x"), ("POST", "/v1/batches/x/cancel"),
    ):  # fmt: skip
        assert httpx.request(method, server.url + route).status_code == 401, (method, route)


# ---------------------------------------------------------------- batches


def test_a_batch_answers_what_the_server_answers(client: openai.OpenAI, folder: Path) -> None:
    requests = [
        {"model": MODEL, "messages": [{"role": "user", "content": f"{n}?"}], "max_tokens": 5}
        for n in range(6)
    ]
    lines = [line(f"c{n}", CHAT, seed=n, **body) for n, body in enumerate(requests)]
    lines.append(line("hot", CHAT, messages=[], temperature=300))
    batch = start(client, lines, CHAT, metadata={"kind": "test"})
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", CHAT)
    assert batch.expires_at == batch.created_at + 86400
    final = until(client, batch.id, "completed")
    counts = final.request_counts
    assert (counts.total, counts.completed, counts.failed) == (7, 6, 1)
    assert final.metadata == {"kind": "test"} and final.errors is None
    moments = [final.created_at, final.in_progress_at, final.finalizing_at, final.completed_at]
    assert moments == sorted(moments)
    by_id = {result["custom_id"]: result for result in results(client, final.output_file_id)}
    assert set(by_id) == {f"c{n}" for n in range(6)}
    for number, body in enumerate(requests):
        reply = client.chat.completions.create(seed=number, **body)  # type: ignore[call-overload]
        response = by_id[f"c{number}"]["response"]
        assert response["status_code"] == 200 and response["request_id"]
        assert response["body"]["choices"][0]["message"]["content"] == (
            reply.choices[0].message.content
        )
    (failed,) = results(client, final.error_file_id)
    assert failed["custom_id"] == "hot" and failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == "temperature"
    output = client.files.retrieve(final.output_file_id)
    assert output.purpose == "batch_output" and output.filename == f"{batch.id}_output.jsonl"
    assert list((folder / "results").iterdir()) == []


def test_a_file_with_wrong_lines_fails_as_a_whole_and_they_are_named(
    client: openai.OpenAI,
) -> None:
    lines = [line("a"), "{", line("a"), line("b", CHAT), line("c", stream=True), {"custom_id": "d"}]
    batch = until(client, start(client, lines).id, "failed")
    assert batch.failed_at is not None and batch.output_file_id is None
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "invalid_url"),
        (5, "invalid_body"),
        (6, "invalid_request_line"),
    ]
    empty = until(client, start(client, ["", " "]).id, "failed")
    assert [error.code for error in empty.errors.data] == ["empty_file"]


def test_a_batch_is_cancelled_and_keeps_what_it_has(client: openai.OpenAI, server: Server) -> None:
    lines = [line("quick")] + [line(f"slow{n}", **LONG) for n in range(40)]
    aborted = server.call(lambda engine: engine.stats().requests_finished.get("abort", 0))
    batch = start(client, lines)
    until(client, batch.id, "in_progress", completed=1)
    with pytest.raises(openai.ConflictError, match="still reads"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    final = until(client, batch.id, "cancelled")
    assert final.cancelling_at is not None and final.cancelled_at is not None
    ids = {result["custom_id"] for result in results(client, final.output_file_id)}
    assert "quick" in ids and len(ids) == final.request_counts.completed < 41
    assert server.becomes(lambda engine: engine.stats().num_requests_running == 0)
    assert server.call(lambda engine: engine.stats().requests_finished["abort"]) > aborted
    with pytest.raises(openai.ConflictError, match="is cancelled"):
        client.batches.cancel(batch.id)
    client.files.delete(batch.input_file_id)


def test_a_batch_expires_and_says_what_it_did_not_do(client: openai.OpenAI) -> None:
    lines = [line("quick")] + [line(f"slow{n}", **LONG) for n in range(60)]
    window: Any = "1s"
    batch = until(client, start(client, lines, completion_window=window).id, "expired")
    assert batch.expired_at is not None
    counts = batch.request_counts
    assert counts.total == 61 == counts.completed + counts.failed and counts.failed > 0
    errors = results(client, batch.error_file_id)
    assert {item["error"]["code"] for item in errors} == {"batch_expired"}
    assert len(errors) == counts.failed


def test_interactive_requests_go_before_batches(client: openai.OpenAI, server: Server) -> None:
    batch = start(client, [line(f"slow{n}", **LONG, priority=-5) for n in range(40)])
    until(client, batch.id, "in_progress")
    assert server.becomes(lambda engine: engine.stats().num_requests_running >= 1)

    def priorities(engine: AsyncEngine) -> set[int]:
        return {
            r.priority for state in engine.core.requests.states.values() for r in state.requests
        }

    assert server.call(lambda engine: min(priorities(engine))) >= 1 << 20
    # Half of max_num_seqs is the most that a batch runs at once.
    assert server.call(lambda engine: len(engine.core.requests.states)) <= 4
    client.batches.cancel(batch.id)
    until(client, batch.id, "cancelled")


def test_batches_are_listed_in_pages_newest_first(client: openai.OpenAI) -> None:
    batch_ids = [start(client, [line(str(number))]).id for number in range(3)]
    first = client.batches.list(limit=2)
    assert [item.id for item in first.data] == batch_ids[:0:-1] and first.has_more
    assert batch_ids[0] == client.batches.list(limit=1, after=batch_ids[1]).data[0].id
    assert [item.id for item in client.batches.list(limit=2)][:3] == batch_ids[::-1]
    for batch_id in batch_ids:
        until(client, batch_id, "completed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"endpoint": "/v1/files"}, "endpoint: must be /v1/chat/completions"),
        ({"completion_window": "soon"}, "completion_window: must be like 24h"),
        ({"completion_window": "31d"}, "completion_window: must be like 24h"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata: at most 16 pairs"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"input_file_id": 7}, "input_file_id"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
            "output_expires_after.seconds",
        ),
    ],
)
def test_a_wrong_batch_is_refused_by_field(
    changes: dict[str, Any], message: str, client: openai.OpenAI
) -> None:
    body = {"input_file_id": "file-none", "endpoint": COMPLETE, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError, match=re.escape(message)):
        client.post("/batches", cast_to=object, body={**body, **changes})


def test_a_batch_needs_a_file_that_is_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no file 'file-none'") as caught:
        client.batches.create(input_file_id="file-none", endpoint=COMPLETE, completion_window="24h")
    assert caught.value.param == "input_file_id"
    batch = until(client, start(client, [line("a")]).id, "completed")
    with pytest.raises(openai.ConflictError, match="batch_output"):
        client.batches.create(
            input_file_id=batch.output_file_id, endpoint=COMPLETE, completion_window="24h"
        )


def test_each_route_says_for_openapi_what_it_takes_and_answers(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    options = ServerOptions(enable_admin=True, batches=BatchOptions(tmp_path))
    operations = {}
    for route in make_app(AsyncEngine(EngineConfig()), options).router.routes():
        path = route.resource.canonical if route.resource is not None else ""
        if path.startswith(("/v1/files", "/v1/batches", "/load", "/reset", "/server_info")):
            if route.method != "HEAD":
                operations[f"{route.method} {path}"] = route.handler.openapi  # type: ignore[attr-defined]
    assert len(operations) == 9 + 3
    assert all(value["summary"] and "200" in value["responses"] for value in operations.values())
    content = operations["POST /v1/batches"]["requestBody"]["content"]["application/json"]
    assert set(msgspec.json.schema(content["schema"])["$defs"]["CreateBatch"]["required"]) == {
        "input_file_id", "endpoint",
    }  # fmt: skip
    # What is answered has exactly the fields that are told.
    batch = until(client, start(client, [line("a")]).id, "completed")
    for path, answered in (
        ("GET /v1/batches/{batch_id}", f"/batches/{batch.id}"),
        ("GET /v1/files/{file_id}", f"/files/{batch.input_file_id}"),
    ):
        kind = operations[path]["responses"]["200"]["content"]["application/json"]["schema"]
        body = client.get(answered, cast_to=object)
        assert set(body) == {field.name for field in msgspec.structs.fields(kind)}


# ---------------------------------------------------------------- the folder


def test_without_a_folder_there_are_no_such_routes(checkpoint: Path) -> None:
    config = engine_config(checkpoint, device="cpu")
    paths = {r.canonical for r in make_app(AsyncEngine(config)).router.resources()}
    assert not any(path.startswith(("/v1/files", "/v1/batches")) for path in paths)


async def test_a_folder_that_cannot_be_used_stops_the_start(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "later").mkdir()
    with sqlite3.connect(tmp_path / "later" / "batches.sqlite3") as db:
        db.execute("PRAGMA user_version = 99")
    for unusable, message in (
        (folder, "another server uses"),
        (tmp_path / "file", "file"),
        (tmp_path / "later", "is of version 99, this one reads 2"),
    ):
        runner = web.AppRunner(
            make_app(AsyncEngine(EngineConfig()), ServerOptions(batches=BatchOptions(unusable)))
        )
        with pytest.raises(ConfigError, match=f"batch_dir: .*{message}"):
            await runner.setup()
        await runner.cleanup()


def test_wrong_flags_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--batch-dir", str(tmp_path), "--batch-max-file-bytes", "0"]
    with pytest.raises(SystemExit) as exit:
        main(["serve", "--device", "cpu", *flags])
    assert exit.value.code == 2
    assert "--batch-max-file-bytes: must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "way",
    ["killed", *(pytest.param(way, marks=pytest.mark.slow) for way in ("drained", "cut off"))],
)
def test_a_restarted_server_goes_on_with_its_batches(
    way: str, checkpoint: Path, tmp_path: Path
) -> None:
    argv = [
        sys.executable, "-m", "jackfield.entrypoints.cli.main", "serve", str(checkpoint),
        "--port", "0", "--served-model-name", MODEL, "--device", "cpu", "--dtype", "float32",
        "--attention-backend", "torch", "--max-model-len", "512", "--num-gpu-blocks-override",
        "200", "--max-num-seqs", "8", "--batch-dir", str(tmp_path / "batches"),
        "--batch-max-concurrency", "2", "--shutdown-timeout", "30",
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}

    def begin() -> tuple[subprocess.Popen[str], openai.OpenAI]:
        process = forked.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        match = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert match is not None
        return process, openai.OpenAI(base_url=match[0] + "/v1", api_key="x")

    count = 20
    process, client = begin()
    try:
        body = {"max_tokens": 100, "ignore_eos": True}
        batch = start(client, [line(f"r{n}", **body) for n in range(count)])
        before = until(client, batch.id, "in_progress", completed=3)
        process.send_signal(signal.SIGKILL if way == "killed" else signal.SIGTERM)
        if way == "cut off":
            assert process.stdout is not None and process.stdout.readline() == "Draining\n"
            process.send_signal(signal.SIGTERM)
        assert process.wait(300) == (-signal.SIGKILL if way == "killed" else 0)
        (path,) = (tmp_path / "batches" / "results").glob("*.output")
        whole = path.read_bytes().rpartition(b"\n")[0].splitlines()
        assert before.request_counts.completed <= len(whole) < count
        assert not any(b'"finish_reason":"abort"' in item for item in whole)
        process, client = begin()
        final = until(client, batch.id, "completed")
        counts = final.request_counts
        assert (counts.total, counts.completed, counts.failed) == (count, count, 0)
        rows = client.files.content(final.output_file_id).read().splitlines()
        assert rows[: len(whole)] == whole
        assert {json.loads(item)["custom_id"] for item in rows} == {f"r{n}" for n in range(count)}
        assert len(rows) == count
        assert client.batches.retrieve(batch.id).in_progress_at == before.in_progress_at
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "header",
    [b"X-Note: a\x01b", b"X-Long: " + b"a" * 20_000, b"no colon", b"X: 1\r\n" * 400],
    ids=["control", "long", "malformed", "many"],
)
def test_a_part_with_wrong_headers_is_the_client_s_fault(server: Server, header: bytes) -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n'
        + header.rstrip(b"\r\n")
        + b"\r\n\r\n{}\r\n--b--\r\n"
    )
    headers = {"Content-Type": "multipart/form-data; boundary=b", "Authorization": f"Bearer {KEY}"}
    response = httpx.post(f"{server.url}/v1/files", content=body, headers=headers)
    assert response.status_code == 400, response.text
    assert "multipart/form-data" in response.json()["error"]["message"]
