"""What the runner of batches makes of an engine that stops under it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from serving import engine_config, save_random

from jackfield import AsyncEngine
from jackfield.core.errors import EngineStopped
from jackfield.entrypoints.batch.lines import LineReader, Result
from jackfield.entrypoints.batch.local import LocalCaller
from jackfield.entrypoints.batch.runner import BatchRunner
from jackfield.entrypoints.openai.app import make_app

LONG = {"ignore_eos": True, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hello", "max_output_tokens": 400, **LONG},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 400, **LONG,
    },
    "/v1/completions": {"prompt": "Hello", "max_tokens": 400, **LONG},
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"))


@pytest.mark.parametrize("url", BODIES)
async def test_requests_that_a_stop_cut_off_have_no_result(
    url: str, checkpoint: Path, tmp_path: Path
) -> None:
    """So that they are asked again when the batch goes on."""
    short = {"max_output_tokens" if url == "/v1/responses" else "max_tokens": 2}
    path = tmp_path / "in.jsonl"
    path.write_text(
        "".join(
            json.dumps({"custom_id": f"r{n}", "method": "POST", "url": url, "body": body}) + "\n"
            for n, body in enumerate([{**BODIES[url], **short}] + [BODIES[url]] * 5)
        )
    )
    delivered: list[dict[str, Any]] = []

    async with AsyncEngine(engine_config(checkpoint, device="cpu", max_num_seqs=4)) as engine:
        done = asyncio.Event()

        async def deliver(result: Result) -> None:
            delivered.append(json.loads(result.encoded))
            done.set()

        app = make_app(engine)
        server = web.AppRunner(app)
        await server.setup()
        async with LocalCaller(app) as caller:
            runner = BatchRunner(engine, caller, asyncio.Semaphore(3))
            lines = LineReader(path, caller.urls, 1 << 20)
            running = asyncio.create_task(runner.run(lines, deliver))
            await done.wait()
            while engine.stats().num_requests_running < 2:
                await asyncio.sleep(0)
            await engine.stop()
            with pytest.raises(EngineStopped):
                await running
        await server.cleanup()
    (line,) = delivered
    assert line["custom_id"] == "r0" and line["response"]["status_code"] == 200
