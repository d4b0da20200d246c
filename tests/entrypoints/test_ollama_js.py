"""Ollama's JavaScript client against the real server."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from serving import MODEL, engine_config, running, save_scripted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed here"),
]
PROGRAM = """
import { Ollama } from 'ollama'
const [host, model] = process.argv.slice(2)
const client = new Ollama({ host })
const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] }
const tools = [{ type: 'function', function: { name: 'get_weather', description: '', parameters } }]
const asked = {
  model, tools, messages: [{ role: 'user', content: 'The weather?' }], options: { temperature: 0 },
}
const whole = await client.chat(asked)
const parts = []
for await (const part of await client.chat({ ...asked, stream: true })) parts.push(part)
let error = ''
try {
  await client.chat({ ...asked, model: 'none' })
} catch (caught) {
  error = caught.message
}
let failed = ''
try {
  for await (const _ of await client.generate({ model, prompt: 'x', raw: true, stream: true,
    options: { mirostat: 1 } })) { }
} catch (caught) {
  failed = caught.message
}
const raw = await client.generate(
  { model, prompt: 'Hello', raw: true, options: { num_predict: 3 } })
const listed = await client.list()
const loaded = await client.ps()
const shown = await client.show({ model })
console.log(JSON.stringify({ whole, parts, error, failed, raw, listed, loaded, shown }))
"""


def test_the_client_gets_what_the_server_says(tmp_path: Path) -> None:
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), "ollama"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"npm cannot install the client: {done.stderr[-300:]}")
    program = tmp_path / "program.mjs"
    program.write_text(PROGRAM)
    checkpoint = save_scripted(tmp_path / "scripted")
    config = engine_config(checkpoint, reasoning_parser="qwen3", tool_call_parser="hermes")
    with running(config) as server:
        completed = subprocess.run(
            ["node", program, server.url, MODEL], capture_output=True, text=True, timeout=120
        )
    assert completed.returncode == 0, completed.stderr
    seen: Any = json.loads(completed.stdout)
    message = seen["whole"]["message"]
    assert (message["thinking"], message["content"]) == ("two and two", "Let me look.")
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"] == {"city": "Lisbon"}
    parts = [part["message"] for part in seen["parts"]]
    assert "".join(part["content"] for part in parts) == message["content"]
    assert [c["function"] for p in parts for c in p.get("tool_calls", ())] == [call["function"]]
    assert seen["parts"][-1]["done"] and seen["parts"][-1]["eval_count"] > 0
    assert "model 'none' not found" in seen["error"]
    assert "options.mirostat: is not supported" in seen["failed"]
    assert seen["raw"]["eval_count"] == 3
    assert [m["name"] for m in seen["listed"]["models"]] == [f"{MODEL}:latest"]
    assert [m["name"] for m in seen["loaded"]["models"]] == [f"{MODEL}:latest"]
    assert "tools" in seen["shown"]["capabilities"]
