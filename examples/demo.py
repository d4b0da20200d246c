"""The demo: serve the embedded model, chat, call a tool, reason; all through the OpenAI client.

    make demo          (or: python examples/demo.py)

Exit status 0 only if every part happened.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from openai import OpenAI

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city"}},
            "required": ["city"],
        },
    },
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(server: subprocess.Popen[bytes], url: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended early with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"the server was not ready within {seconds:.0f} s")


def chat(client: OpenAI, model: str) -> bool:
    """A streamed answer."""
    question = "Hello! What is Jackfield?"
    print(f"\n=== A streamed chat\nuser:      {question}\nassistant: ", end="", flush=True)
    text = ""
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=128,
        stream=True,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    ):
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            text += piece
            print(piece, end="", flush=True)
    print()
    return len(text.split()) > 2


def tool_call(client: OpenAI, model: str) -> bool:
    """A question that needs a tool, and the answer made of its result."""
    messages: list = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    print(f"\n=== A tool call\nuser:      {messages[0]['content']}")
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    response = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], temperature=0, max_tokens=128,
        extra_body=options,
    )  # fmt: skip
    calls = response.choices[0].message.tool_calls or []
    if response.choices[0].finish_reason != "tool_calls" or not calls:
        print(f"assistant: {response.choices[0].message.content!r} (no tool call)")
        return False
    call = calls[0].function
    print(f"assistant: calls {call.name}({call.arguments})")
    result = json.dumps({"city": "Lisbon", "temperature": 21, "condition": "sunny"})
    print(f"tool:      {result}")
    messages.append(response.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": result})
    final = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], temperature=0, max_tokens=128,
        extra_body=options,
    )  # fmt: skip
    text = final.choices[0].message.content or ""
    print(f"assistant: {text}")
    return json.loads(call.arguments).get("city") == "Lisbon" and bool(text)


def reasoning(client: OpenAI, model: str) -> bool:
    """A word problem: reasoning apart from the answer."""
    question = "Tom has 5 apples and buys 3 more. Then he gives away 2. How many apples are left?"
    print(f"\n=== A reasoning answer\nuser:      {question}")
    response = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=256,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    message = response.choices[0].message
    reasoning_text = getattr(message, "reasoning_content", None) or ""
    print(f"reasoning: {reasoning_text.strip()}\nassistant: {message.content}")
    return bool(reasoning_text.strip()) and "6" in (message.content or "")


def main() -> int:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    start = time.monotonic()
    print("Starting: jackfield serve (the embedded model)", flush=True)
    server = subprocess.Popen(
        [sys.executable, "-m", "jackfield.entrypoints.cli.main", "serve", "--port", str(port)],
        start_new_session=True,
    )
    outcomes: dict[str, bool] = {}
    try:
        wait_until_ready(server, url)
        print(f"Ready after {time.monotonic() - start:.1f} s at {url}")
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        model = client.models.list().data[0].id
        for part in (chat, tool_call, reasoning):
            outcomes[part.__name__] = part(client, model)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            status = server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            status = server.wait()
    outcomes["shutdown"] = status == 0
    print("\n" + ", ".join(f"{name}: {'ok' if ok else 'FAILED'}" for name, ok in outcomes.items()))
    return 0 if len(outcomes) == 4 and all(outcomes.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
