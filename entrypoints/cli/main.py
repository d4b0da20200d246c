"""The `jackfield` command. Heavy modules are imported by the command that needs them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ... import __version__

Command = Callable[[list[str]], int]


def _serve(argv: list[str]) -> int:
    from .serve import run

    return run(argv)


def _chat(argv: list[str]) -> int:
    from .client import chat

    return chat(argv)


def _complete(argv: list[str]) -> int:
    from .client import complete

    return complete(argv)


def _run_batch(argv: list[str]) -> int:
    from .run_batch import run

    return run(argv)


def _plugins(argv: list[str]) -> int:
    from .plugins import run

    return run(argv, COMMANDS)


def _bench(argv: list[str]) -> int:
    from ..bench.command import run

    return run(argv)


COMMANDS: dict[str, tuple[Command, str]] = {
    "serve": (_serve, "serve a model over HTTP, as OpenAI does"),
    "chat": (_chat, "talk to a running server"),
    "complete": (_complete, "complete a text on a running server"),
    "run-batch": (_run_batch, "answer a file of requests, without a server"),
    "bench": (_bench, "measure speed, here and against others"),
    "plugins": (_plugins, "list what is plugged in, and whether it works here"),
}


def main(argv: list[str] | None = None) -> int:
    """→ exit status"""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"jackfield {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    if name in COMMANDS:
        return COMMANDS[name][0](rest)
    return _from_plugin(name, rest)


def _from_plugin(name: str, argv: list[str]) -> int:
    """A command that a plugin registered."""
    import difflib

    from ...core.errors import PluginError
    from ...core.registry import load_plugins

    try:
        registry = load_plugins()["command"]
        if name in registry:
            return int(registry.load(name)(argv) or 0)
    except PluginError as error:
        print(f"jackfield: {error}", file=sys.stderr)
        return 1
    near = difflib.get_close_matches(name, [*COMMANDS, *registry], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    print(f"jackfield: no such command: {name}{hint}", file=sys.stderr)
    return 2


def _usage() -> str:
    lines = ["usage: jackfield COMMAND [options]", "", "commands:"]
    lines += [f"  {name:10} {text}" for name, (_, text) in COMMANDS.items()]
    lines += ["", "`jackfield COMMAND --help` lists a command's options."]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
