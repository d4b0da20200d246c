"""Flags of vLLM's server that need nothing here, and those that ask for what is not here.

The first are taken, and said to have no effect; the others are refused with what to do instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

_ONE_PROCESS = "engine and worker share a process"
_NO_COMPILER = "no graph is compiled for its shapes; --enforce-eager turns CUDA graphs off"
_STEPS = "two steps are always in flight"
_LOADS = "loading shows no bar"
NO_EFFECT: dict[str, tuple[int | str, str]] = {
    "--async-scheduling": (0, _STEPS),
    "--no-async-scheduling": (0, _STEPS),
    "--code-revision": (1, "a checkpoint's code is never run"),
    "--compilation-config": (1, _NO_COMPILER),
    "--optimization-level": (1, _NO_COMPILER),
    "-O": ("?", _NO_COMPILER),
    "--max-seq-len-to-capture": (1, "graphs hold sequences of any length"),
    "--cuda-graph-sizes": ("+", "a graph is recorded for a number of rows when it is needed"),
    "--disable-custom-all-reduce": (0, "there is one GPU"),
    "--disable-frontend-multiprocessing": (0, _ONE_PROCESS),
    "--distributed-executor-backend": (1, _ONE_PROCESS),
    "--disable-log-stats": (0, "nothing is logged of them; they are at /metrics"),
    "--enable-prompt-tokens-details": (0, "usage always has them"),
    "--enable-reasoning": (0, "--reasoning-parser is enough"),
    "--enable-server-load-tracking": (0, "/load always counts"),
    "--prefix-caching-hash-algo": (1, "blocks are always found by a hash that nobody can forge"),
    "--swap-space": (1, "preempted requests are computed again"),
    "--use-tqdm-on-load": (0, _LOADS),
    "--no-use-tqdm-on-load": (0, _LOADS),
}
"""Flag → how many values it has, and why it needs none."""

_ADAPTERS = "adapters (LoRA) are not supported yet"
_PICTURES = "models that see or hear are not supported yet"
_GPUS = "more than one GPU is not supported yet"
_TRACES = "traces are not exported; plugins hear of each request and step (request_finished)"
MISSING: dict[str, str] = {
    **dict.fromkeys(
        ("--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank", "--max-cpu-loras"),
        _ADAPTERS,
    ),
    **dict.fromkeys(
        ("--limit-mm-per-prompt", "--mm-processor-kwargs", "--allowed-local-media-path",
         "--language-model-only"), _PICTURES,
    ),
    **dict.fromkeys(
        ("--data-parallel-size", "-dp", "--enable-expert-parallel", "--headless"), _GPUS
    ),
    **dict.fromkeys(("--otlp-traces-endpoint", "--collect-detailed-traces"), _TRACES),
    "--convert": "see --runner and --task",
    "--cpu-offload-gb": "weights stay on the device; see --quantization",
    "--download-dir": "set the variable HF_HUB_CACHE",
    "--enable-sleep-mode": "an engine does not sleep yet; stop and start it",
    "--hf-token": "set the variable HF_TOKEN",
    "--kv-cache-memory-bytes": "see --gpu-memory-utilization and --num-gpu-blocks-override",
    "--kv-events-config": "KV events are not published yet",
    "--middleware": "a plugin adds routes and middleware: register_routes",
    "--model-loader-extra-config": "loaders have no options; a plugin can register another one",
    "--override-pooler-config": "see --pooler-config",
    "--reasoning-parser-plugin": "install it as a package: jackfield plugins new reasoning-parser",
    "--scheduler-cls": "see --scheduling-policy, which takes a plugin's",
    "--speculative-config": "speculative decoding is not supported yet",
    "--stream-interval": "each step's tokens are sent when they are there",
    "--tool-parser-plugin": "install it as a package: jackfield plugins new tool-parser",
}  # fmt: skip
"""Flag → what to say."""


class _Taken(argparse.Action):
    """Remembers that it was given."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        namespace.no_effect = [*getattr(namespace, "no_effect", ()), option_string]


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Those of `NO_EFFECT`."""
    for flag, (nargs, _) in NO_EFFECT.items():
        parser.add_argument(
            flag,
            action=_Taken,
            nargs=nargs,
            dest=f"vllm {flag}",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def without_effect(args: argparse.Namespace) -> Iterable[str]:
    """A sentence for each flag of these that was given."""
    for flag in dict.fromkeys(getattr(args, "no_effect", ())):
        yield f"{flag} has no effect: {NO_EFFECT[flag][1]}"
