"""/start_profile and /stop_profile write a timeline of loop, worker and device."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Server, engine_config, running

from jackfield.core.config import ProfilerConfig
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.server.serve_settings import settings

BODY = {"prompt": "Hello", "max_tokens": 6, "ignore_eos": True}
MAX_STEPS = 12

APART = 1e6
"""Microseconds: the profiler converts another clock, whose rate it measures, some milliseconds
wrong on a busy machine. Without that, they are years apart."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles") / "new"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    profiles = ProfilerConfig(torch_profiler_dir=str(folder), max_iterations=MAX_STEPS)
    config = engine_config(EMBEDDED_MODEL, device="cpu", profiler_config=profiles)
    with running(config, ServerOptions(enable_admin=True)) as running_server:
        yield running_server


def post(server: Server, route: str, status: int = 200, **body: Any) -> httpx.Response:
    response = httpx.post(server.url + route, json=body or None, timeout=120)
    assert response.status_code == status, response.text
    return response


def spans(trace: str) -> list[dict[str, Any]]:
    with gzip.open(trace) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def test_a_trace_has_the_loops_steps_and_what_the_worker_did_in_them(
    server: Server, folder: Path
) -> None:
    before = {*folder.glob("*")}
    post(server, "/start_profile")
    assert "runs already" in post(server, "/start_profile", 400).text
    post(server, "/v1/completions", **BODY)
    [trace] = post(server, "/stop_profile").json()["traces"]
    assert {*folder.glob("*")} - before == {Path(trace)}, "nothing else is left"
    events = spans(trace)
    loop = [event for event in events if event.get("cat") == "loop"]
    steps = {event["name"]: event for event in loop if event["name"].startswith("step ")}
    assert len(steps) >= 6
    planned = {event["args"]["step"] for event in loop if event["name"] == "plan"}
    numbers = {int(re.findall(r"\d+", name)[0]) for name in steps}
    assert numbers == planned
    launches = {
        event["name"]: event for event in events
        if event["name"] in steps and event.get("cat") == "user_annotation"
    }  # fmt: skip
    assert launches.keys() == steps.keys()
    for name, launch in launches.items():
        # One clock: a step is launched after it was planned, and before its result is there.
        step = steps[name]
        assert step["ts"] - APART <= launch["ts"]
        assert launch["ts"] + launch["dur"] <= step["ts"] + step["dur"] + APART
        inner = [
            event for event in events
            if event.get("cat") == "cpu_op" and event["tid"] == launch["tid"]
            and launch["ts"] <= event["ts"] <= launch["ts"] + launch["dur"]
        ]  # fmt: skip
        assert any(event["name"].startswith("aten::") for event in inner), name


def test_a_profile_ends_by_itself_after_so_many_steps(server: Server) -> None:
    post(server, "/start_profile")
    post(server, "/v1/completions", **{**BODY, "max_tokens": 3 * MAX_STEPS})
    assert server.becomes(lambda engine: engine.core.steps.timeline is None)
    [trace] = post(server, "/stop_profile").json()["traces"]
    loop = [event for event in spans(trace) if event.get("cat") == "loop"]
    assert sum(event["name"] == "publish" for event in loop) == MAX_STEPS
    assert "no profile runs" in post(server, "/stop_profile", 400).text


def test_a_profile_without_steps_is_a_trace(server: Server) -> None:
    post(server, "/start_profile")
    [trace] = post(server, "/stop_profile").json()["traces"]
    assert not [event for event in spans(trace) if event.get("cat") == "loop"]


def test_a_server_without_a_folder_names_the_option() -> None:
    with running(engine_config(EMBEDDED_MODEL), ServerOptions(enable_admin=True)) as plain:
        assert "--profiler-config.torch_profiler_dir" in post(plain, "/start_profile", 400).text
        assert "no profile runs" in post(plain, "/stop_profile", 400).text
    with running(engine_config(EMBEDDED_MODEL)) as closed:
        post(closed, "/start_profile", 404)
        post(closed, "/stop_profile", 404)


def test_the_folder_of_vllms_variable_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", "/from/variable")
    assert settings([]).config.profiler_config.torch_profiler_dir == "/from/variable"
    argv = ["--profiler-config", '{"profiler": "torch", "torch_profiler_dir": "/from/flag"}']
    assert settings(argv).config.profiler_config.torch_profiler_dir == "/from/flag"
