"""`jackfield convert`: write a checkpoint divided among ranks, for faster starts."""

from __future__ import annotations

import argparse

from ...core.errors import ConfigError, JackfieldError
from ...core.local_path import local_path
from ...core.registry import load_plugins
from ..flags.engine_flags import add_engine_options, engine_config, fail
from ..flags.parser import Parser
from ..flags.values import json_value
from .log_level import add_log_level, start_logging

DEFAULT_FILE_SIZE = 5 << 30
OPTIONS = (
    "revision", "config_format", "load_format", "model_loader_extra_config", "quantization",
    "dtype", "tensor_parallel_size", "pipeline_parallel_size", "pipeline_layer_partition",
    "enable_expert_parallel", "model_impl", "hf_overrides", "plugin_options", "disable_plugins",
)  # fmt: skip
"""Engine options that affect the files."""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jackfield convert",
        description="Write the weights of a checkpoint as each rank of an engine holds them, so "
        "that a rank reads its own alone, and copy the checkpoint's other files. Needs no GPU, and "
        "memory for the weights of one rank. The same --tensor-parallel-size, "
        "--enable-expert-parallel and --quantization are given to the engine, with --load-format "
        "as --to here.",
    )
    parser.add_argument("--model", default="", help="checkpoint; none: the embedded one")
    parser.add_argument(
        "-o", "--output", required=True, metavar="FOLDER", help="a new folder for the result"
    )
    parser.add_argument(
        "--to", default="sharded_state", metavar="FORMAT",
        help="weight loader that reads the result (default: sharded_state)",
    )  # fmt: skip
    parser.add_argument(
        "--to-extra-config", type=json_value, default={}, metavar="JSON",
        help="the format's own options, as --model-loader-extra-config has them when it is read",
    )  # fmt: skip
    parser.add_argument(
        "--max-file-size", type=int, default=DEFAULT_FILE_SIZE, metavar="BYTES",
        help=f"begin another file beyond this size (default: {DEFAULT_FILE_SIZE})",
    )  # fmt: skip
    add_log_level(parser)
    add_engine_options(parser, OPTIONS)
    return parser


def run(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    start_logging(args)
    try:
        return _run(args)
    except KeyboardInterrupt:
        return 1
    except (JackfieldError, OSError) as error:
        return fail(error)


def _run(args: argparse.Namespace) -> int:
    from ...core.loading.state.convert import convert, make_saver

    if args.max_file_size < 1:
        raise ConfigError(f"--max-file-size: must be at least 1, got {args.max_file_size}")
    config = engine_config(args, args.model)
    plugins = load_plugins(disable=config.disable_plugins)
    saver = make_saver(plugins, args.to, args.to_extra_config, args.max_file_size)
    folder = local_path(args.output)
    for rank, files in enumerate(convert(config, plugins, saver, folder)):
        size = sum(files.values())
        print(f"rank {rank}: {size / 1e9:.3f} GB in {len(files)} files", flush=True)
    name, ranks, stages = (
        config.quantization, config.tensor_parallel_size, config.pipeline_parallel_size
    )  # fmt: skip
    flags = [f"--model {folder}", f"--load-format {args.to}"]
    flags += [f"--tensor-parallel-size {ranks}"] * (ranks > 1)
    flags += [f"--pipeline-parallel-size {stages}"] * (stages > 1)
    if (partition := config.pipeline_layer_partition) is not None:
        flags.append(f"--pipeline-layer-partition {','.join(map(str, partition))}")
    flags += ["--enable-expert-parallel"] * config.enable_expert_parallel
    flags += [f"--quantization {name}"] if name else []
    print(f"jackfield serve {' '.join(flags)}")
    return 0
