"""`jackfield chat` and `jackfield complete`: small clients of a running server."""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from ..flags.engine_flags import Parser
from ..stdout import reader_left


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    parser = Parser(prog=f"jackfield {name}", description=text)
    parser.add_argument(
        "--url", type=_url, default="http://127.0.0.1:8000", help="where the server is"
    )
    parser.add_argument("--model", help="default: the first one served")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("JACKFIELD_API_KEY", ""),
        help="key to send; also from JACKFIELD_API_KEY",
    )
    parser.add_argument("--max-tokens", type=int, help="tokens to generate at most")
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: 1")
    return parser


def _url(text: str) -> str:
    """Parse a server's address. A trailing /v1 is removed, because OpenAI's clients and vLLM's
    write it."""
    try:
        parts = urllib.parse.urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # The port is not a number.
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(f"must be like http://127.0.0.1:8000, got {text!r}")
    return text.rstrip("/").removesuffix("/v1")


def chat(argv: list[str]) -> int:
    """Chat interactively, or send one message with --message."""
    parser = _parser("chat", "Talk to a running server.")
    parser.add_argument("-m", "--message", help="send this one message and end")
    parser.add_argument("--system", help="system prompt")
    args = parser.parse_args(argv)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    try:
        if args.message is not None:
            _say(args, [*messages, {"role": "user", "content": args.message}])
            return 0
        while True:
            text = input("> ")
            if text.strip():
                messages.append({"role": "user", "content": text})
                messages.append({"role": "assistant", "content": _say(args, messages)})
    except (EOFError, KeyboardInterrupt):
        print()
        return 0
    except OSError as error:
        return _explain(error, args.url)


def complete(argv: list[str]) -> int:
    """Complete a text from an argument or from standard input."""
    parser = _parser("complete", "Complete a text on a running server.")
    parser.add_argument("prompt", nargs="?", help="default: standard input")
    args = parser.parse_args(argv)
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    try:
        for event in _events(args, "/v1/completions", {"prompt": prompt}):
            for choice in event["choices"]:
                print(choice["text"], end="", flush=True)
        print()
        return 0
    except OSError as error:
        return _explain(error, args.url)


def _say(args: argparse.Namespace, messages: list[dict[str, str]]) -> str:
    """Send a conversation, show the response as it arrives; return its text."""
    text = ""
    thinking = False
    for event in _events(args, "/v1/chat/completions", {"messages": messages}):
        for choice in event["choices"]:
            reasoning = choice["delta"].get("reasoning_content") or ""
            content = choice["delta"].get("content") or ""
            if content and thinking:
                print("\n")
            thinking = bool(reasoning) or (thinking and not content)
            text += content
            print(reasoning + content, end="", flush=True)
    print()
    return text


def _events(args: argparse.Namespace, route: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """POST a body, and yield the stream's chunks."""
    body = {**body, "stream": True}
    for name in ("model", "max_tokens", "temperature"):
        if getattr(args, name) is not None:
            body[name] = getattr(args, name)
    request = urllib.request.Request(
        args.url + route,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {args.api_key}"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                event = json.loads(data)
                if "error" in event:
                    raise OSError(event["error"]["message"])
                yield event


def _explain(error: OSError, url: str) -> int:
    if isinstance(error, BrokenPipeError) and reader_left():
        raise error
    if isinstance(error, urllib.error.HTTPError):
        try:
            message = json.loads(error.read())["error"]["message"]
        except (ValueError, KeyError):
            message = str(error)
        print(f"jackfield: the server refused: {message}", file=sys.stderr)
    elif isinstance(error, urllib.error.URLError):
        print(
            f"jackfield: no server at {url} ({error.reason}); start one with `jackfield serve`, or "
            "give --url",
            file=sys.stderr,
        )
    else:
        print(f"jackfield: {error}", file=sys.stderr)
    return 1
