"""`--config FILE`: flags from a YAML file; the command line takes precedence.

    model: path/to/checkpoint
    port: 8001
    served-model-name: [small, tiny]
    enable-prefix-caching: false
    structured-outputs-config: {backend: xgrammar}

Keys are flags' names without leading dashes, with `-` or `_`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.spelling import nearest
from .foreign_options import ANY, command_line, option_of, spelled, translated
from .parser import Parser


def add_config(group: Any) -> None:
    group.add_argument(
        "--config", metavar="FILE", help="YAML file of flags; those on the command line win"
    )


def with_config(parser: Parser, argv: list[str], args: argparse.Namespace) -> list[str]:
    """Return the command line, plus the flags of `args.config` that it lacks.

    args: `parser`'s result. Raises ConfigError with the key's name.
    """
    dests = _dests(parser, argv)
    if getattr(args, "model", None) or getattr(args, "model_flag", None):
        dests.add("model_flag")
    words = list(argv)
    for key, value in _read(args.config).items():
        flag, action = _flag(parser, key, args.config)
        if value is None or (action is not None and action.dest in dests):
            continue
        if action is not None and flag not in parser.other_options:
            words += _words(flag, action, value, args.config)
            continue
        given = _other_words(parser, flag, value)
        if not dests & _dests(parser, given):
            words += given
    return words


def _dests(parser: Parser, argv: list[str]) -> set[str]:
    """Return the namespace attributes that a command line sets."""
    flags = parser._option_string_actions
    names = (word.split("=")[0] for word in command_line(parser, translated(parser, argv)))
    return {flags[name].dest for name in names if name in flags}


def _other_words(parser: Parser, flag: str, value: Any) -> list[str]:
    """Return a key that another server has, and its value, as command-line words."""
    if isinstance(value, bool):
        opposite = flag.replace("--", "--no-", 1)
        has_opposite = option_of(parser, opposite)[0] != "unknown"
        return [flag] if value else [opposite] * has_opposite
    if isinstance(value, list) and parser.other_options[flag].nargs in ("+", ANY):
        return [flag, *map(_text, value)]
    return [f"{flag}={_text(value)}"]


def without_config(argv: list[str]) -> list[str]:
    words = iter(argv)
    remaining = []
    for word in words:
        if word == "--config":
            next(words, None)
        elif not word.startswith("--config="):
            remaining.append(word)
    return remaining


def _read(path: str) -> dict[str, Any]:
    import yaml

    try:
        loader = yaml.SafeLoader(Path(path).read_text("utf-8"))
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            _check_unique((key for key, _ in node.value), path)
        content = None if node is None else loader.construct_document(node)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"--config: {path}: {text}", param="config") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path}: must be a mapping of flags", param="config")
    return content


def _check_unique(keys: Iterable[Any], path: str) -> None:
    """Raise ConfigError for a duplicate key, of which YAML takes the last.

    keys: YAML nodes.
    """
    seen = set()
    for key in keys:
        name = str(key.value).replace("_", "-")
        if name in seen:
            raise ConfigError(
                f"--config: {path}: line {key.start_mark.line + 1}: {key.value} is there twice; "
                "remove one of them",
                param="config",
            )
        seen.add(name)


def _flag(parser: Parser, key: Any, path: str) -> tuple[str, argparse.Action | None]:
    """Return a key's flag, and its action, or None if it is another server's."""
    flags = parser._option_string_actions
    name = str(key)
    for flag in (f"--{name}", f"--{name.replace('_', '-')}"):
        if flag in flags and flags[flag].dest not in ("help", "config"):
            return flag, flags[flag]
    flag = spelled(parser, f"--{name}")
    if (other := parser.other_options.get(flag)) is not None:
        if other.state == "refused" and not other.neutral:
            raise ConfigError(f"--config: {path}: {name}: {other.text}", param=name)
        return flag, None
    if name == "config":
        raise ConfigError(f"--config: {path}: config: a file names no other file", param=name)
    names = [flag.removeprefix("--") for flag in flags if flag.startswith("--")]
    near = nearest(name, names)
    hint = f"; did you mean {near}?" if near else ""
    raise ConfigError(f"--config: {path}: {name}: no such flag{hint}", param=name)


def _words(flag: str, action: argparse.Action, value: Any, path: str) -> list[str]:
    """Return a key and value as command-line words."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(
                f"--config: {path}: {flag[2:]}: must be true or false, got {value!r}",
                param=flag[2:],
            )
        if value:
            return [flag]
        opposite = flag.replace("--", "--no-", 1)
        return [opposite] if opposite in action.option_strings else []
    if isinstance(value, list):
        if action.nargs == "+":
            return [flag, *(_text(item) for item in value)] if value else []
        if isinstance(action, argparse._AppendAction):
            return [f"{flag}={_text(item)}" for item in value]
    return [f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    if isinstance(value, bool | dict | list):
        return json.dumps(value)
    return str(value)
