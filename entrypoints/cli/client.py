"""`jackfield chat` and `jackfield complete`: small clients of a running server."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from ..flags.parser import Parser
from ..stdout import reader_left

BROKE_OFF = "the response broke off: the server or the connection ended"


class ResponseFailed(OSError):
    """A response broke off, or is none of this protocol."""


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
    try:
        prompt = sys.stdin.buffer.read().decode() if args.prompt is None else args.prompt
    except UnicodeDecodeError as error:
        parser.error(f"standard input is no text in UTF-8: {error}")
    try:
        _show(
            choice.get("text") or "" for choice in _choices(args, "/v1/completions", prompt=prompt)
        )
        return 0
    except OSError as error:
        return _explain(error, args.url)


def _say(args: argparse.Namespace, messages: list[dict[str, str]]) -> str:
    """Send a conversation, show the response as it arrives; return its text."""
    text = ""

    def parts() -> Iterator[str]:
        nonlocal text
        thinking = False
        for choice in _choices(args, "/v1/chat/completions", messages=messages):
            delta = choice.get("delta") or {}
            reasoning, content = delta.get("reasoning_content") or "", delta.get("content") or ""
            yield "\n\n" if content and thinking else ""
            thinking = bool(reasoning) or (thinking and not content)
            text += content
            yield reasoning + content

    _show(parts())
    return text


def _show(parts: Iterator[str]) -> None:
    """Print text as it arrives, and end its line, also before an error."""
    shown = False
    try:
        for part in parts:
            print(part, end="", flush=True)
            shown = shown or bool(part)
    except OSError:
        if shown and not reader_left():
            print()
        raise
    print()


def _choices(args: argparse.Namespace, route: str, **body: Any) -> Iterator[dict[str, Any]]:
    """POST a body, and yield the choices in the stream's chunks. Raises OSError."""
    try:
        for event in _events(args, route, body):
            yield from event["choices"]
    except http.client.IncompleteRead:
        raise ResponseFailed(BROKE_OFF) from None
    except (http.client.HTTPException, ValueError, TypeError, KeyError, AttributeError):
        raise ResponseFailed(
            f"what answers at {args.url} does not speak OpenAI's protocol"
        ) from None


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
            if data == "[DONE]":
                return
            if data:
                event = json.loads(data)
                if "error" in event:
                    raise ResponseFailed(event["error"]["message"])
                yield event
    raise ResponseFailed(BROKE_OFF)


def _explain(error: OSError, url: str) -> int:
    if isinstance(error, BrokenPipeError) and reader_left():
        raise error
    if isinstance(error, urllib.error.HTTPError):
        try:
            message = json.loads(error.read())["error"]["message"]
        except (ValueError, KeyError, TypeError):
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
