"""`jackfield complete`: a text, continued by a running server."""

from __future__ import annotations

import sys

from .client import Client, Display, make_parser


def run(argv: list[str]) -> int:
    """Return the exit status."""
    parser = make_parser("complete", "Complete a text on a running server.")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="default: standard input")
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="the same, as vLLM has it")
    args = parser.parse_args(argv)
    client = Client(args)
    prompt = args.quick if args.prompt is None else args.prompt
    try:
        prompt = sys.stdin.buffer.read().decode() if prompt is None else prompt
    except UnicodeDecodeError as error:
        parser.error(f"standard input is no text in UTF-8: {error}")
    try:
        choices = client.choices("/v1/completions", prompt=prompt)
        Display().show(("", choice.get("text") or "") for choice in choices)
        client.show_stats()
        return 0
    except OSError as error:
        print(f"jackfield: {client.explained(error)}", file=sys.stderr)
        return 1
