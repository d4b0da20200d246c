"""The `jackfield` command. Heavy modules are imported by the command that needs them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ... import __version__
from ...core.hooks import hookimpl
from ..stdout import reader_left, run_command

Command = Callable[[list[str]], int]


def _serve(argv: list[str]) -> int:
    from .serve import run

    return run(argv)


def _chat(argv: list[str]) -> int:
    from .chat import run

    return run(argv)


def _complete(argv: list[str]) -> int:
    from .complete import run

    return run(argv)


def _top(argv: list[str]) -> int:
    from .top import run

    return run(argv)


def _run_batch(argv: list[str]) -> int:
    from .run_batch import run

    return run(argv)


def _convert(argv: list[str]) -> int:
    from .convert import run

    return run(argv)


def _pull(argv: list[str]) -> int:
    from .models import run_pull

    return run_pull(argv)


def _list(argv: list[str]) -> int:
    from .models import run_list

    return run_list(argv)


def _rm(argv: list[str]) -> int:
    from .models import run_rm

    return run_rm(argv)


def _alias(argv: list[str]) -> int:
    from .models import run_alias

    return run_alias(argv)


def _keys(argv: list[str]) -> int:
    from .keys import run

    return run(argv)


def _lora(argv: list[str]) -> int:
    from .lora import run

    return run(argv)


def _plugins(argv: list[str]) -> int:
    from .plugins import run

    return run(argv)


def _bench(argv: list[str]) -> int:
    from ..bench.command import run

    return run(argv)


def _debug(argv: list[str]) -> int:
    from .debug import run

    return run(argv)


def _collect_env(argv: list[str]) -> int:
    from .collect_env import run

    return run(argv)


COMMANDS: dict[str, tuple[Command, str]] = {
    "serve": (_serve, "serve a model over HTTP, as OpenAI does"),
    "chat": (_chat, "talk to a running server"),
    "complete": (_complete, "complete a text on a running server"),
    "top": (_top, "watch a running server"),
    "run-batch": (_run_batch, "answer a file of requests, without a server"),
    "convert": (_convert, "write a checkpoint divided among ranks, for faster starts"),
    "pull": (_pull, "fetch a model by its name"),
    "list": (_list, "list the models that were fetched, and aliases"),
    "rm": (_rm, "remove models that were fetched, or aliases"),
    "alias": (_alias, "give a model a name of one's own"),
    "keys": (_keys, "create API keys with names and limits for a server"),
    "lora": (_lora, "look at an adapter before it is served"),
    "bench": (_bench, "measure speed, here and against others"),
    "debug": (_debug, "replay the steps that an engine has recorded, and compare"),
    "plugins": (_plugins, "list what is plugged in, and whether it works here"),
    "collect-env": (_collect_env, "print versions, devices and variables for a fault's report"),
}


@hookimpl
def register_commands(commands: Any) -> None:
    """Register the built-in commands first, so that plugins cannot take their names."""
    for name, (function, text) in COMMANDS.items():
        commands.add(name, function, help=text, final=True)


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    return run_command(functools.partial(_run, sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"jackfield {__version__}")
        return 0
    name, arguments = argv[0], argv[1:]
    if name in COMMANDS:
        return COMMANDS[name][0](arguments)
    return _from_plugin(name, arguments)


def _from_plugin(name: str, argv: list[str]) -> int:
    """Run a plugin's command; exceptions are printed with its distribution."""
    import traceback

    from ...core.errors import JackfieldError, PluginError
    from ...core.registration.plugin_checks import near
    from ...core.registry import load_plugins
    from ..flags.engine_flags import fail

    try:
        registry = load_plugins()["command"]
        if name not in registry:
            hint = near(name, registry)
            print(f"jackfield: no such command: {name}{hint}", file=sys.stderr)
            return 2
        command = registry.load(name)
    except PluginError as error:
        print(f"jackfield: {error}", file=sys.stderr)
        return 1
    try:
        with registry.calling(name, "its function"):
            return _status(command(argv))
    except PluginError as error:
        if isinstance(error.__cause__, BrokenPipeError) and reader_left():
            raise error.__cause__ from None
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"jackfield: {error}", file=sys.stderr)
        return 1
    except JackfieldError as error:
        return fail(error)


def _status(value: object) -> int:
    """Return the exit status; raises TypeError for other values."""
    if value is None or isinstance(value, int):
        return int(value or 0)
    kind = type(value).__name__
    raise TypeError(f"it returned {kind}, and an exit status is a whole number or None")


def _usage() -> str:
    lines = ["usage: jackfield COMMAND [options]", "", "commands:"]
    lines += [f"  {name:11} {text}" for name, (_, text) in COMMANDS.items()]
    lines += _usage_of_plugins()
    lines += ["", "`jackfield COMMAND --help` lists a command's options."]
    return "\n".join(lines)


def _usage_of_plugins() -> list[str]:
    """Return help lines on plugins' commands, or why they could not be loaded."""
    from ...core.errors import PluginError
    from ...core.registry import load_plugins

    try:
        entries = load_plugins()["command"].entries()
    except PluginError as error:
        return ["", f"commands of plugins: {error}"]
    commands = [entry for entry in entries if entry.name not in COMMANDS]
    if not commands:
        return []
    width = max(10, *(len(entry.name) for entry in commands))
    lines = [
        f"  {e.name:{width}} {e.help} ({e.provenance.distribution})".replace("  (", " (")
        for e in commands
    ]
    return ["", "commands of plugins:", *lines]


if __name__ == "__main__":
    raise SystemExit(main())
