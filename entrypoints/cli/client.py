"""What `jackfield chat` and `jackfield complete` share: flags, streamed responses, display."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

from ..flags.parser import Parser
from ..stdout import reader_left

BROKE_OFF = "the response broke off: the server or the connection ended"
DEFAULT_URL = "http://127.0.0.1:8000"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {
    code: 0xFFFD for code in range(127, 160)
}
"""Control characters, which a terminal would obey → their replacements."""


class ResponseFailed(OSError):
    """A response broke off, or is none of this protocol."""


def make_parser(name: str, text: str) -> Parser:
    parser = Parser(prog=f"jackfield {name}", description=text)
    add_url(parser)
    parser.add_argument(
        "--model", "--model-name", metavar="NAME", help="default: the first one served"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("JACKFIELD_API_KEY", ""),
        help="key to send; also from JACKFIELD_API_KEY",
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens to generate at most")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy; default: 1")
    parser.add_argument(
        "--stats", action="store_true", help="after each response, its tokens and their speed"
    )
    return parser


def add_url(parser: Parser) -> None:
    parser.add_argument(
        "--url",
        type=_url,
        default=os.environ.get("JACKFIELD_URL") or DEFAULT_URL,
        help=f"where the server is; also from JACKFIELD_URL (default: {DEFAULT_URL})",
    )


def _url(text: str) -> str:
    """Parse a server's address, removing a trailing /v1, as clients write it."""
    try:
        parts = urllib.parse.urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # The port is not a number.
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(f"must be like {DEFAULT_URL}, got {text!r}")
    return text.rstrip("/").removesuffix("/v1")


class Client:
    """Sends requests with common fields."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.url: str = args.url
        self.api_key: str = args.api_key
        self.fields: dict[str, Any] = {
            name: getattr(args, name)
            for name in ("model", "max_tokens", "temperature")
            if getattr(args, name) is not None
        }
        self.stats = Stats() if args.stats else None
        """Statistics of the last response, if requested."""

    def choices(self, route: str, **body: Any) -> Iterator[dict[str, Any]]:
        """POST a body, and yield the choices of the stream. Raises OSError."""
        try:
            for event in self._events(route, body):
                if self.stats is not None:
                    self.stats.add(event)
                yield from event["choices"]
        except http.client.IncompleteRead:
            raise ResponseFailed(BROKE_OFF) from None
        except (http.client.HTTPException, ValueError, TypeError, KeyError, AttributeError):
            raise ResponseFailed(
                f"what answers at {self.url} does not speak OpenAI's protocol"
            ) from None

    def _events(self, route: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        body = {**self.fields, **body, "stream": True}
        if self.stats is not None:
            self.stats = Stats()
            body["stream_options"] = {"include_usage": True}
        request = urllib.request.Request(
            self.url + route,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {self.api_key}"},
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

    def explained(self, error: OSError) -> str:
        """Describe a response's error. Raises it if standard output has no reader."""
        if isinstance(error, BrokenPipeError) and reader_left():
            raise error
        if isinstance(error, urllib.error.HTTPError):
            try:
                message = json.loads(error.read())["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = str(error)
            return f"the server refused: {message}"
        if isinstance(error, urllib.error.URLError):
            return (
                f"no server at {self.url} ({error.reason}); start one with `jackfield serve`, or "
                "give --url"
            )
        return str(error)

    def show_stats(self) -> None:
        if self.stats is not None:
            print(self.stats, file=sys.stderr)


class Stats:
    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first = self._last = self._start
        self._tokens = 0

    def add(self, event: dict[str, Any]) -> None:
        if usage := event.get("usage"):
            self._tokens = int(usage["completion_tokens"])
        if event["choices"]:
            self._last = time.perf_counter()
            if self._first == self._start:
                self._first = self._last

    def __str__(self) -> str:
        text = f"{self._tokens} tokens, the first after {self._first - self._start:.2f} s"
        if self._tokens > 1 and self._last > self._first:
            text += f", then {(self._tokens - 1) / (self._last - self._first):.0f} per second"
        return text


class Display:
    """Prints a response as it arrives; on a terminal reasoning is dim, and control characters are
    visible.
    """

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._colors = self._terminal and not os.environ.get("NO_COLOR")

    def show(self, parts: Iterable[tuple[str, str]]) -> None:
        """Print pairs of reasoning and text, and end the line, even on an error."""
        shown = dim = False
        try:
            for reasoning, content in parts:
                if reasoning:
                    dim = self._switch(dim, True)
                    self._write(reasoning)
                if content:
                    if dim:
                        self._write("\n\n")
                    dim = self._switch(dim, False)
                    self._write(content)
                shown = shown or bool(reasoning or content)
        except BaseException as error:
            self._switch(dim, False)
            if isinstance(error, KeyboardInterrupt) or (shown and not reader_left()):
                print(flush=True)
            raise
        self._switch(dim, False)
        print(flush=True)

    def _switch(self, before: bool, dim: bool) -> bool:
        if self._colors and before != dim:
            print(DIM if dim else PLAIN, end="", flush=True)
        return dim

    def _write(self, text: str) -> None:
        print(text.translate(VISIBLE) if self._terminal else text, end="", flush=True)
