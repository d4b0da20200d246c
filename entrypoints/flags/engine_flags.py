"""Command-line flags, derived from EngineConfig: one flag per field, with vLLM's names."""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from ...core.config import EngineConfig
from ...core.errors import ConfigError, PluginError
from ...core.registration.plugin_options import with_option
from ..models.names import find_model
from ..stdout import reader_left
from .parser import Parser
from .values import json_value, number_or, scaled_number

UNIONS = (types.UnionType, typing.Union)
ALIASES = {
    "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep",
    "executor": "--distributed-executor-backend",
    "nnodes": "-n",
    "pipeline_parallel_size": "-pp",
    "quantization": "-q",
    "structured_outputs_config.backend": "--guided-decoding-backend",
    "tensor_parallel_size": "-tp",
}
"""Option → vLLM's other flag for it."""
REGISTRIES = {
    "all2all_backend": "all2all_backend",
    "attention_backend": "attention_backend",
    "collectives": "collectives",
    "executor": "executor",
    "kv_compression": "kv_compressor",
    "load_format": "weight_loader",
    "logits_processors": "logits_processor",
    "operations": "operations",
    "quantization": "quantization",
    "reasoning_parser": "reasoning_parser",
    "scheduling_policy": "schedule_policy",
    "structured_outputs_config.backend": "structured_backend",
    "tool_call_parser": "tool_parser",
}
"""Option with a plugin's name → registry of these names."""


def add_no_plugin(group: Any) -> None:
    group.add_argument(
        "--no-plugin",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out the plugin with this entry point or distribution; repeatable",
    )


def add_hf_token(group: Any) -> None:
    group.add_argument(
        "--hf-token",
        nargs="?",
        const="",
        metavar="TOKEN",
        help="the hub's token, as in the variable HF_TOKEN, which other users of this machine "
        "cannot see; without a value, the one that `hf auth login` has stored",
    )


def set_hf_token(args: argparse.Namespace) -> None:
    """Set the variable that `huggingface_hub` reads, here and in the processes that are started."""
    if getattr(args, "hf_token", None):
        os.environ["HF_TOKEN"] = args.hf_token


def add_device_ids(group: Any) -> None:
    group.add_argument(
        "--device-ids",
        type=_device_ids,
        metavar="IDS",
        help="GPUs to use, as 0,1 or as their UUIDs: sets the variable CUDA_VISIBLE_DEVICES",
    )


def _device_ids(text: str) -> str:
    ids = [each.strip() for each in text.split(",")]
    if not all(re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", each) for each in ids):
        raise argparse.ArgumentTypeError(f"must be GPUs such as 0,1, got {text!r}")
    if len(set(ids)) != len(ids):
        raise argparse.ArgumentTypeError(f"names a GPU twice: {text!r}")
    return ",".join(ids)


def set_device_ids(args: argparse.Namespace) -> None:
    """Set the variable that CUDA reads, here and in the processes that are started. Raises
    ConfigError if it is set to other devices."""
    ids = getattr(args, "device_ids", None)
    if ids is None:
        return
    already = os.environ.setdefault("CUDA_VISIBLE_DEVICES", ids)
    if already != ids:
        raise ConfigError(
            f"device_ids: the variable CUDA_VISIBLE_DEVICES says {already!r}; leave one of them "
            "out",
            param="device_ids",
        )


def add_engine_options(parser: Parser, only: Collection[str] | None = None) -> None:
    """Add a flag per field of EngineConfig except `model`, or per field in `only`, and
    `--no-plugin` and `--plugin-option`; each class of options is a group.
    """
    hints = typing.get_type_hints(EngineConfig, include_extras=True)
    parser.names_of = _registered_names
    for kind in _option_classes():
        names = kind.__annotations__.keys() - {"model"}
        names = names if only is None else names & set(only)
        if not names and kind is not EngineConfig:
            continue
        group = parser.add_argument_group(_title(kind.__name__), _first_sentence(kind))
        if kind is EngineConfig:
            _add_plugin_options(group)
            if only is None:
                add_hf_token(group)
                add_device_ids(group)
        for name in filter(names.__contains__, kind.__struct_fields__):
            base, text = _unpack(hints[name])
            default = getattr(EngineConfig(), name)
            if not isinstance(default, msgspec.Struct):
                _add(group, name, base, text, default)
                continue
            parts = parser.add_argument_group(name.removesuffix("_config").replace("_", " "), text)
            _add(parts, name, base, text, None)
            for part, hint in typing.get_type_hints(base, include_extras=True).items():
                _add(parts, f"{name}.{part}", *_unpack(hint), getattr(default, part))


def _option_classes() -> list[type[msgspec.Struct]]:
    """Return the classes that declare EngineConfig's fields, in order."""
    classes = [kind for kind in EngineConfig.__mro__ if issubclass(kind, msgspec.Struct)]
    return [kind for kind in reversed(classes) if kind is not msgspec.Struct]


def _title(name: str) -> str:
    return re.sub(r"(Options|Config)$", "", name).lower()


def _first_sentence(kind: type) -> str:
    if kind is EngineConfig:  # Its own docstring is about all of them.
        return "Plugins, and recordings of steps."
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def _add_plugin_options(group: Any) -> None:
    add_no_plugin(group)
    group.add_argument(
        "--plugin-option",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="an option of a plugin's own (`jackfield plugins NAME` lists them): VALUE is JSON, or "
        "text where it is none; repeatable",
    )


@functools.cache
def _plugins() -> Any:
    from ...core.registry import load_plugins

    return load_plugins()


def _registered_names(option: str) -> Iterable[str]:
    """Return an option's registered names; none for other options, or if plugins fail to load,
    which the start reports.
    """
    if option not in REGISTRIES:
        return ()
    try:
        return list(_plugins()[REGISTRIES[option]])
    except PluginError:
        return ()


def _add(group: argparse._ArgumentGroup, name: str, kind: Any, text: str, default: Any) -> None:
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    if default not in (None, "", (), {}) and "default:" not in text:
        shown = {True: "on", False: "off"}[default] if kind is bool else default
        text = f"{text} (default: {shown})"
    options["help"] = text.replace("%", "%%")
    names = [f"--{name.replace('_', '-')}"]
    if name in ALIASES:
        names.append(ALIASES[name])
    if kind is bool:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **options)
    elif typing.get_origin(kind) is tuple:
        group.add_argument(*names, nargs="+", metavar="NAME", **options)
    elif typing.get_origin(kind) is typing.Literal:
        group.add_argument(*names, choices=typing.get_args(kind), **options)
    elif typing.get_origin(kind) in UNIONS:
        words = [word for part in typing.get_args(kind) for word in typing.get_args(part)]
        group.add_argument(*names, type=number_or(words), metavar=f"N|{'|'.join(words)}", **options)
    elif kind in (int, float, str):
        last_word = "NAME" if name in REGISTRIES else name.rpartition(".")[2].upper()
        metavar = {int: "N", float: "X"}.get(kind, last_word)
        parse = scaled_number if kind is int else kind
        group.add_argument(*names, type=parse, metavar=metavar, **options)
    else:
        group.add_argument(*names, type=json_value, metavar="JSON", **options)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
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


def engine_config(args: argparse.Namespace, model: str, *, fetch: bool = True) -> EngineConfig:
    """Return the configuration of a model by its name; fetch: copy it from an object store, if it
    is there. Raises ConfigError, LoadError.
    """
    options = engine_options(args)
    set_hf_token(args)
    set_device_ids(args)
    named = find_model(model, options.get("download_dir"), fetch=fetch)
    name = named.name if model else "jackfield-tiny"
    if name is not None:
        options.setdefault("served_model_name", (name,))
    return EngineConfig.from_options({"model": named.model, **options})


def fail(error: Exception) -> int:
    """Print an error; return the exit status. Raises BrokenPipeError if standard output has no
    reader.
    """
    if isinstance(error, BrokenPipeError) and reader_left():
        raise error
    kind = "error" if not isinstance(error, ConfigError) else "configuration error"
    print(f"jackfield: {kind}: {with_flags(str(error))}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def with_flags(message: str) -> str:
    """Return a message with options written as flags: max_num_seqs → --max-num-seqs. Names that are
    words are replaced only at the beginning.
    """
    first, anywhere = _patterns()
    return anywhere.sub(_as_flag, first.sub(_as_flag, message))


def _as_flag(match: re.Match[str]) -> str:
    return f"--{match[0].replace('_', '-')}"


@functools.cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of the option at a message's beginning, and of others in it."""
    parser = Parser(add_help=False)
    add_engine_options(parser)
    dests = {action.dest for action in parser._actions} - {"plugin_option", "no_plugin", "hf_token"}
    names = sorted(dests, key=len, reverse=True)  # The whole of a.b, before a.
    every = "|".join(map(re.escape, names))
    unmistakable = "|".join(re.escape(name) for name in names if "_" in name)
    # Not within paths, quotes and longer names.
    return (
        re.compile(rf"^({every})(?=: )"),
        re.compile(rf"(?<![\w./'\"-])({unmistakable})(?![\w./]\w|[/\w])"),
    )


def _unpack(hint: Any) -> tuple[Any, str]:
    """Return type and description: Annotated[int | None, Meta(...)] → (int, description); for a
    number or certain words, the union.
    """
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
