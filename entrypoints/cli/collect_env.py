"""`jackfield collect-env`: what a bug report needs to say of the machine, without secrets."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

from ... import __version__
from ...core.errors import PluginError
from ...core.registry import load_plugins
from ..flags.parser import Parser
from ..flags.secrets import HIDDEN, IN_ADDRESS

PACKAGES = (
    "aiohttp", "flashinfer-python", "huggingface-hub", "llguidance", "msgspec", "numpy",
    "nvidia-nccl-cu12", "ray", "safetensors", "tokenizers", "torch", "transformers", "triton",
    "xgrammar",
)  # fmt: skip
VARIABLES = re.compile(
    r"(JACKFIELD|VLLM|CUDA|NVIDIA|NCCL|TORCH|PYTORCH|TRITON|HF|HUGGINGFACE|TRANSFORMERS|OMP|MKL|"
    r"RAY|GLOO|LD_LIBRARY|TOKENIZERS)(_.*)"
)
"""Names of environment variables that change what an engine does."""
SECRET = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASS|AUTH|CREDENTIAL", re.IGNORECASE)
"""In names of variables whose values are not printed."""


def make_parser() -> Parser:
    return Parser(
        prog="jackfield collect-env",
        description="Print versions, devices, packages, plugins and the environment variables that "
        "matter, for a report of a fault; keys, tokens and passwords are left out.",
    )


def run(argv: list[str]) -> int:
    make_parser().parse_args(argv)
    for title, lines in _sections():
        print(f"{title}:")
        for line in lines:
            print(f"  {line}")
    return 0


def _sections() -> Iterator[tuple[str, list[str]]]:
    yield "jackfield", [f"version {__version__}", f"commit {_commit()}"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    cores = len(os.sched_getaffinity(0))
    yield "system", [
        platform.platform(), f"Python {sys.version.split()[0]}",
        f"{cores} of {os.cpu_count()} processors, {memory:.1f} GiB of memory",
    ]  # fmt: skip
    yield "devices", _devices()
    yield "packages", [f"{name} {version}" for name in PACKAGES if (version := _version(name))]
    yield "plugins", _plugins()
    yield "environment", list(variables(os.environ))


def _commit() -> str:
    from ..bench.report import commit

    return commit()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    import torch

    lines = [f"torch's CUDA {torch.version.cuda or 'none'}"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            lines.append(
                f"cuda:{index} {device.name}, {device.total_memory / (1 << 30):.1f} GiB, "
                f"compute capability {device.major}.{device.minor}"
            )
    else:
        lines.append("no CUDA device that torch can use")
    return lines + _driver()


def _driver() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [f"driver {version}" for version in dict.fromkeys(done.stdout.split())]


def _plugins() -> list[str]:
    try:
        plugins = load_plugins()
    except PluginError as error:
        return [f"not loaded: {error}"]
    places = (plugin.provenance for plugin in plugins.loaded.values())
    lines = dict.fromkeys(f"{p.distribution} {p.version}: {p.entry_point}" for p in places)
    left_out = [f"{each.provenance.entry_point}: left out: {each.error}" for each in plugins.failed]
    return [*lines, *left_out]


def variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the variables that matter; the values of secret ones are not shown."""
    for name, value in sorted(environ.items()):
        if VARIABLES.fullmatch(name):
            hidden = SECRET.search(name) is not None
            yield f"{name}={'(set)' if hidden else IN_ADDRESS.sub(f'{HIDDEN}@', value)}"
