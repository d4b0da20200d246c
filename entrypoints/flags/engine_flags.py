"""Command-line flags, derived from EngineConfig: one flag a field, with vLLM's names."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...core.config import EngineConfig
from ...core.errors import ConfigError
from ...core.registration.plugin_options import with_option
from ..stdout import reader_left
from .values import number_or, scaled_number


class Parser(argparse.ArgumentParser):
    """An argument parser that answers an unknown flag with the nearest valid one, and accepts no
    abbreviated flags."""

    missing: Mapping[str, str] = {}
    """Flags known from other servers → why they do not exist here, or what to use instead."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "allow_abbrev": False})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but with hints for unknown flags."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._explain(unknown))
        return parsed

    def _explain(self, unknown: list[str]) -> str:
        flag = unknown[0].split("=")[0]
        if (why := self.missing.get(flag.replace("_", "-"))) is not None:
            return f"{flag}: {why}"
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
        hint = f"; did you mean {near[0]}?" if near and flag.startswith("-") else ""
        return f"unrecognized argument: {unknown[0]}{hint}"


UNIONS = (types.UnionType, typing.Union)
"""What `typing.get_origin` returns of `X | Y`."""
ALIASES = {
    "data_parallel_size": "-dp",
    "executor": "--distributed-executor-backend",
    "pipeline_parallel_size": "-pp",
    "quantization": "-q",
    "structured_outputs_config.backend": "--guided-decoding-backend",
    "tensor_parallel_size": "-tp",
}
"""Option → another flag that vLLM has, or had, for it."""


def add_no_plugin(group: Any) -> None:
    """Add `--no-plugin` to a parser or to a group of one."""
    group.add_argument(
        "--no-plugin",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out the plugin with this entry point or distribution; repeatable",
    )


def add_engine_options(
    parser: argparse.ArgumentParser, only: Collection[str] | None = None
) -> None:
    """Add a flag for each field of EngineConfig except `model`, or for the fields `only`, and
    `--no-plugin` and `--plugin-option`."""
    group = parser.add_argument_group("engine")
    add_no_plugin(group)
    group.add_argument(
        "--plugin-option",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="an option of a plugin's own (`jackfield plugins NAME` lists them): VALUE is JSON, or "
        "text where it is none; repeatable",
    )
    hints = typing.get_type_hints(EngineConfig, include_extras=True)
    for name in EngineConfig.__struct_fields__:
        if name == "model" or (only is not None and name not in only):
            continue
        kind, text = _unpack(hints[name])
        default = getattr(EngineConfig(), name)
        if not isinstance(default, msgspec.Struct):
            _add(group, name, kind, text, default)
            continue
        _add(group, name, kind, text, "see the flags below")
        for part, hint in typing.get_type_hints(kind, include_extras=True).items():
            _add(group, f"{name}.{part}", *_unpack(hint), getattr(default, part))


def _add(group: argparse._ArgumentGroup, name: str, kind: Any, text: str, default: Any) -> None:
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    options["help"] = f"{text} (default: {default})".replace("%", "%%")
    names = [f"--{name.replace('_', '-')}"]
    if "_" in name:
        names.append(f"--{name}")
    if name in ALIASES:
        names.append(ALIASES[name])
    if kind is bool:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **options)
    elif typing.get_origin(kind) is tuple:
        group.add_argument(*names, nargs="+", **options)
    elif typing.get_origin(kind) is typing.Literal:
        group.add_argument(*names, choices=typing.get_args(kind), **options)
    elif typing.get_origin(kind) in UNIONS:
        words = [word for part in typing.get_args(kind) for word in typing.get_args(part)]
        group.add_argument(*names, type=number_or(words), metavar=f"N|{'|'.join(words)}", **options)
    elif kind in (int, float, str):
        metavar = name.rpartition(".")[2].upper()
        parse = scaled_number if kind is int else kind
        group.add_argument(*names, type=parse, metavar=metavar, **options)
    else:
        group.add_argument(*names, type=json_value, metavar="JSON", **options)


def json_value(text: str) -> Any:
    """Return the value of a JSON text, for a parser's `type`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}: {text!r}") from None


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options among parsed flags."""
    fields = set(EngineConfig.__struct_fields__) - {"model"}
    flags = vars(args)
    options = {name: value for name, value in flags.items() if name in fields}
    for name, value in flags.items():
        field, dot, part = name.partition(".")
        if dot and field in fields:
            whole = options.get(field, {})
            if not isinstance(whole, dict):
                raise ConfigError(f"{field}: must be a JSON object, got {whole!r}", param=field)
            options[field] = {**whole, part: value}
    for text in args.plugin_option:
        options["plugin_options"] = with_option(options.get("plugin_options", {}), text)
    if args.no_plugin:
        options["disable_plugins"] = (*options.get("disable_plugins", ()), *args.no_plugin)
    return options


def engine_config(args: argparse.Namespace, model: str) -> EngineConfig:
    """Return the configuration of parsed flags. Raises ConfigError."""
    options = engine_options(args)
    if not model:
        options.setdefault("served_model_name", ("jackfield-tiny",))
    return EngineConfig.from_options({"model": model, **options})


def fail(error: Exception) -> int:
    """Print an error; return the exit status. Raises BrokenPipeError if it is that standard output
    has no reader."""
    if isinstance(error, BrokenPipeError) and reader_left():
        raise error
    kind = "error" if not isinstance(error, ConfigError) else "configuration error"
    print(f"jackfield: {kind}: {error}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def _unpack(hint: Any) -> tuple[Any, str]:
    """Return the type and the description: Annotated[int | None, Meta(...)] → (int,
    description). Of a number or certain words: the union of both."""
    text = ""
    while typing.get_origin(hint) is typing.Annotated:
        base, *metas = typing.get_args(hint)
        text = text or next((m.description for m in metas if m.description), "")
        hint = base
    if typing.get_origin(hint) in UNIONS:
        inner = [_unpack(part)[0] for part in typing.get_args(hint) if part is not type(None)]
        if inner[0] is int and typing.get_origin(inner[-1]) is typing.Literal:
            return int | inner[-1], text
        return inner[0], text
    return hint, text
