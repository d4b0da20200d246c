"""Codex and Claude Code, the newest of npm as they come, work on a folder through this server.

Their model is scripted: what it calls the agents run, and the results come back in their next
requests. They talk to 127.0.0.1 alone. What they send is in tests/entrypoints/recorded, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from serving import Server, engine_config, running, save_turns

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed here"),
]
CONTEXT = 131072
PACKAGES = ("@openai/codex", "@anthropic-ai/claude-code")
PATCH = "*** Begin Patch\n*** Add File: patched.txt\n+a patch\n*** End Patch\n"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both agents' commands."""
    folder = tmp_path_factory.mktemp("npm")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        pytest.skip(f"npm cannot install the agents: {done.stderr[-300:]}")
    return folder / "node_modules" / ".bin"


class Sent(msgspec.Struct):
    """A request that an agent sent, and the status of its response."""

    route: str
    body: Any
    status: int


@contextlib.contextmanager
def recorded(server: Server) -> Iterator[tuple[str, list[Sent]]]:
    """Yield the address of a proxy in front of the server, and the requests that come."""
    requests: list[Sent] = []
    ready = threading.Event()
    state: dict[str, Any] = {}

    async def forward(request: web.Request) -> web.StreamResponse:
        data = await request.read()
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session,
            session.request(
                request.method,
                server.url + request.path_qs,
                data=data,
                headers={"Content-Type": request.content_type, "x-api-key": "none"},
            ) as answer,
        ):
            body = json.loads(data) if data else None
            requests.append(Sent(request.path, body, answer.status))
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            return response

    async def main() -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        state["url"] = f"http://127.0.0.1:{runner.addresses[0][1]}"
        state["loop"], state["end"] = asyncio.get_running_loop(), asyncio.Event()
        ready.set()
        await state["end"].wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    ready.wait(60)
    try:
        yield state["url"], requests
    finally:
        state["loop"].call_soon_threadsafe(state["end"].set)
        thread.join(60)


def call(name: str, **arguments: Any) -> str:
    inner = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{inner}\n</tool_call>"


def run(
    command: list[str | Path], folder: Path, home: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run an agent in a folder, with nothing of this user's settings."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
    return subprocess.run(
        command,
        cwd=folder,
        env={**kept, "HOME": str(home), "NO_PROXY": "127.0.0.1", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )


def work(tmp_path: Path, turns: list[str], name: str) -> contextlib.AbstractContextManager[Server]:
    checkpoint = save_turns(tmp_path / "model", turns, CONTEXT)
    config = engine_config(
        checkpoint,
        served_model_name=(name,),
        tool_call_parser="hermes",
        max_model_len=CONTEXT,
        num_gpu_blocks_override=2 * CONTEXT // 16,
        max_num_batched_tokens=8192,
    )
    return running(config)


def codex(programs: Path, tmp_path: Path, url: str, model: str) -> Path:
    """Let Codex work; return its folder."""
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    (home / "config.toml").write_text(
        f'model = "{model}"\nmodel_provider = "jackfield"\ncheck_for_update_on_startup = false\n'
        "[analytics]\nenabled = false\n"
        '[model_providers.jackfield]\nname = "Jackfield"\nwire_api = "responses"\n'
        f'base_url = "{url}/v1"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
    )
    command = [
        programs / "codex",
        "exec",
        "--skip-git-repo-check",
        "--sandbox",
        "danger-full-access",
    ]
    done = run([*command, "Do it."], folder, home, CODEX_HOME=str(home))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "All done." in done.stdout
    return folder


def outputs(requests: list[Sent]) -> list[dict[str, Any]]:
    """The results in the last request."""
    return [item for item in requests[-1].body["input"] if item["type"].endswith("_output")]


def test_codex_runs_commands_and_calls_tools_of_namespaces(programs: Path, tmp_path: Path) -> None:
    turns = [
        call("exec_command", cmd="echo made > made.txt; echo seen"),
        call("multi_agent_v1__close_agent", target="nobody"),
        "All done.",
    ]
    with work(tmp_path, turns, "tiny") as server, recorded(server) as (url, requests):
        folder = codex(programs, tmp_path, url, "tiny")
    assert (folder / "made.txt").read_text() == "made\n"
    assert {request.status for request in requests} == {200}
    assert len([request for request in requests if request.body]) == 3
    first, second = outputs(requests)
    assert "seen" in json.dumps(first["output"]) and second["output"]
    calls = [item for item in requests[-1].body["input"] if item["type"] == "function_call"]
    assert [(item["name"], item.get("namespace")) for item in calls] == [
        ("exec_command", None), ("close_agent", "multi_agent_v1"),
    ]  # fmt: skip


def test_codex_applies_patches_by_a_custom_tool(programs: Path, tmp_path: Path) -> None:
    """Its own list says which tools a model of this name has: patches are a custom tool of it."""
    turns = [call("apply_patch", input=PATCH), call("tool_search", query="calendar"), "All done."]
    with work(tmp_path, turns, "gpt-5.5") as server, recorded(server) as (url, requests):
        folder = codex(programs, tmp_path, url, "gpt-5.5")
    assert (folder / "patched.txt").read_text() == "a patch\n"
    assert {request.status for request in requests} == {200}
    kinds = [item["type"] for item in outputs(requests)]
    assert kinds == ["custom_tool_call_output", "tool_search_output"]


def test_claude_code_runs_commands(programs: Path, tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    turns = [
        call("Bash", command="echo made > made.txt; echo seen", description="Makes a file"),
        call("Read", file_path=str(folder / "made.txt")),
        "All done.",
    ]
    with work(tmp_path, turns, "tiny") as server, recorded(server) as (url, requests):
        done = run(
            [programs / "claude", "-p", "Do it.", "--model", "tiny", "--allowedTools", "Bash,Read"],
            folder,
            home,
            ANTHROPIC_BASE_URL=url,
            ANTHROPIC_API_KEY="none",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            DISABLE_TELEMETRY="1",
            DISABLE_AUTOUPDATER="1",
            DISABLE_ERROR_REPORTING="1",
        )
    assert done.returncode == 0 and "All done." in done.stdout, done.stdout + done.stderr[-2000:]
    assert (folder / "made.txt").read_text() == "made\n"
    sent = [request for request in requests if request.route.startswith("/v1/")]
    assert {request.status for request in sent} == {200}
    results = [
        block
        for message in sent[-1].body["messages"]
        if message["role"] == "user" and isinstance(message["content"], list)
        for block in message["content"]
        if block["type"] == "tool_result"
    ]
    assert "seen" in json.dumps(results[0]) and "made" in json.dumps(results[1])
