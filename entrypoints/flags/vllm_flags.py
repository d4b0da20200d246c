"""vLLM's flags that are unnecessary (accepted and reported), or unsupported (refused with an
alternative).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

_NO_COMPILER = "no graph is compiled for its shapes; --enforce-eager turns CUDA graphs off"
_STEPS = "two steps are always in flight"
_LOADS = "loading shows a bar on terminals"
NO_EFFECT: dict[str, tuple[int | str, str]] = {
    "--async-scheduling": (0, _STEPS),
    "--no-async-scheduling": (0, _STEPS),
    "--code-revision": (1, "a checkpoint's code is never run"),
    "--collect-detailed-traces": (1, "a trace always has a span for each phase of a request"),
    "--compilation-config": (1, _NO_COMPILER),
    "--optimization-level": (1, _NO_COMPILER),
    "-O": ("?", _NO_COMPILER),
    "--max-seq-len-to-capture": (1, "graphs hold sequences of any length"),
    "--cuda-graph-sizes": ("+", "a graph is recorded for a number of rows when it is needed"),
    "--disable-custom-all-reduce": (0, "collectives are chosen by --collectives"),
    "--disable-frontend-multiprocessing": (0, "engine and worker share a process"),
    "--enable-ep-weight-filter": (0, "a rank reads its own experts alone"),
    "--enable-prompt-tokens-details": (0, "usage always has them"),
    "--enable-reasoning": (0, "--reasoning-parser is enough"),
    "--enable-server-load-tracking": (0, "/load always counts"),
    "--prefix-caching-hash-algo": (1, "blocks are always found by a hash that cannot be forged"),
    "--swap-space": (1, "preempted requests are computed again"),
    "--use-tqdm-on-load": (0, _LOADS),
    "--no-use-tqdm-on-load": (0, _LOADS),
}
"""Flag → number of values, and why it is unnecessary."""

_ADAPTERS = "adapters (LoRA) are not supported yet"
_PICTURES = "models that see or hear are not supported yet"
_GPUS = (
    "ranks divide layers (--tensor-parallel-size), and engines share the requests "
    "(--data-parallel-size), on one host or on those of a Ray cluster (--executor ray)"
)
_ONE_HOST = (
    "the engines of --data-parallel-size are those of one server, on its host or where a Ray "
    "cluster has room (--executor ray)"
)
MISSING: dict[str, str] = {
    **dict.fromkeys(
        ("--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank", "--max-cpu-loras"),
        _ADAPTERS,
    ),
    **dict.fromkeys(
        ("--limit-mm-per-prompt", "--mm-processor-kwargs", "--allowed-local-media-path",
         "--language-model-only"), _PICTURES,
    ),
    "--headless": _GPUS,
    **dict.fromkeys(
        ("--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr",
         "--data-parallel-size-local", "-dpl", "--data-parallel-address", "-dpa",
         "--data-parallel-rpc-port", "-dpp", "--data-parallel-hybrid-lb"), _ONE_HOST,
    ),
    **dict.fromkeys(
        ("--num-redundant-experts", "--eplb-window-size", "--eplb-step-interval"),
        "see --eplb-config",
    ),
    "--expert-placement-strategy": "ranks hold neighbours; --enable-eplb moves experts by load",
    "--convert": "see --runner and --task",
    "--cpu-offload-gb": "weights stay on the device; see --quantization",
    "--download-dir": "set the variable HF_HUB_CACHE",
    "--enable-sleep-mode": "an engine does not sleep yet; stop and start it",
    "--hf-token": "set the variable HF_TOKEN",
    "--kv-cache-memory-bytes": "see --gpu-memory-utilization and --num-gpu-blocks-override",
    "--kv-events-config": "KV events are not published yet",
    "--middleware": "a plugin adds routes and middleware: register_routes",
    "--override-pooler-config": "see --pooler-config",
    "--reasoning-parser-plugin": "install it as a package: jackfield plugins new reasoning-parser",
    "--scheduler-cls": "see --scheduling-policy, which takes a plugin's",
    "--stream-interval": "each step's tokens are sent when they are there",
    "--tool-parser-plugin": "install it as a package: jackfield plugins new tool-parser",
}  # fmt: skip


VLLM_GROUPS = {
    "attention": "execution",
    "compilation": "execution",
    "device": "model",
    "frontend": "server",
    "kvtransfer": "cache",
    "load": "model",
    "observability": "HTTP",
    "pooler": "model",
    "scheduler": "scheduling",
    "speculative": "execution",
    "vllm": "engine",
}
"""vLLM's group in lower case without "Config" → the corresponding group."""
SYNONYMS: dict[str, tuple[str, Any, str]] = {
    "--disable-uvicorn-access-log": ("access_log", "off", "--access-log off"),
    "--disable-log-requests": ("enable_log_requests", False, "--no-enable-log-requests"),
}
"""Flag → namespace attribute, value to set, and the equivalent flag."""


PLUGIN_OPTIONS = {"--otlp-traces-endpoint": ("traces.endpoint", "URL")}
"""Flag → the plugin's option that it sets, and its metavar."""


class _PluginOption(argparse.Action):
    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        option = f"{PLUGIN_OPTIONS[self.dest][0]}={json.dumps(values)}"
        namespace.plugin_option = [*namespace.plugin_option, option]


class _Taken(argparse.Action):
    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        namespace.no_effect = [*getattr(namespace, "no_effect", ()), option_string]


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("other names", "vLLM's names of flags above.")
    for flag, (dest, value, same) in SYNONYMS.items():
        group.add_argument(
            flag,
            action="store_const",
            const=value,
            dest=dest,
            default=argparse.SUPPRESS,
            help=f"the same as {same}",
        )
    for flag, (option, metavar) in PLUGIN_OPTIONS.items():
        group.add_argument(
            flag,
            action=_PluginOption,
            dest=flag,
            default=argparse.SUPPRESS,
            metavar=metavar,
            help=f"the same as --plugin-option {option}={metavar}",
        )
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
    """Yield a sentence for each given flag."""
    for flag in dict.fromkeys(getattr(args, "no_effect", ())):
        yield f"{flag} has no effect: {NO_EFFECT[flag][1]}"
