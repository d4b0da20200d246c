"""The pytest plugin: options that choose registered names, and a test class for each of them.

pytest imports this wherever Jackfield is installed, so it imports very little. Its options exist
only in a run that names this package, so that `--model` stays free for other plugins.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PACKAGE = __name__.rpartition(".")[0]
FOLDER = Path(__file__).resolve().parent
FRONT = FOLDER / "test_registered.py"


class Kit(NamedTuple):
    """Location of the kit for a kind of plugin."""

    option: str
    module: str
    class_name: str


KITS = {
    "model": Kit("--model", "models", "ModelKit"),
    "attention_backend": Kit("--attention-backend", "attention", "AttentionBackendKit"),
    "checkpoint_format": Kit("--checkpoint-format", "checkpoint_formats", "CheckpointFormatKit"),
    "latent_attention_backend": Kit(
        "--latent-attention-backend", "latent_attention", "LatentAttentionBackendKit"
    ),
    "quantization": Kit("--quantization", "quantization", "QuantizationKit"),
    "reasoning_parser": Kit("--reasoning-parser", "parsers", "ReasoningParserKit"),
    "tool_parser": Kit("--tool-parser", "parsers", "ToolParserKit"),
    "kv_connector": Kit("--kv-connector", "kv_connectors", "KVConnectorKit"),
    "kv_compressor": Kit("--kv-compressor", "kv_compressors", "KVCompressorKit"),
    "logits_processor": Kit("--logits-processor", "logits_processors", "LogitsProcessorKit"),
    "structured_backend": Kit("--grammar-backend", "grammars", "GrammarBackendKit"),
    "all2all_backend": Kit("--all2all-backend", "all2all", "All2AllKit"),
    "collectives": Kit("--collectives", "collectives", "CollectivesKit"),
    "executor": Kit("--executor", "executors", "ExecutorKit"),
    "operations": Kit("--operations", "operations", "OperationsKit"),
    "schedule_policy": Kit("--schedule-policy", "policies", "SchedulePolicyKit"),
    "part": Kit("--part", "parts", "PartKit"),
    "speculator": Kit("--speculator", "speculators", "SpeculatorKit"),
    "weight_loader": Kit("--weight-loader", "loaders", "WeightLoaderKit"),
    "media_model": Kit("--media-model", "media", "MediaModelKit"),
    "adapter_format": Kit("--adapter-format", "adapters", "AdapterFormatKit"),
    "adapter_resolver": Kit("--adapter-resolver", "adapters", "AdapterResolverKit"),
}
"""Kits by the registry's name of the kind."""

CHOSEN = pytest.StashKey[dict[str, list[str]]]()
"""Kind → names to check."""

# Kits, and the checks that they are made of.
pytest.register_assert_rewrite(
    *sorted(f"{PACKAGE}.{file.stem}" for file in FOLDER.glob("*.py") if file.stem != "options")
)


def _destination(kind: str) -> str:
    return f"jackfield_conformance_{kind}"


def _named(args: Sequence[str]) -> bool:
    """Return whether the command line requests this package's tests."""
    for arg in args:
        path = str(arg).partition("::")[0]
        if path == PACKAGE or path.startswith(f"{PACKAGE}."):
            return True
        if not path.startswith("-") and Path(path).resolve() in (FOLDER, FRONT):
            return True
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: Any, parser: Any, args: list[str]) -> None:
    """Add the options, if this run is about this package."""
    if not _named(args):
        return
    group = parser.getgroup("jackfield", "conformance of Jackfield's plugins")
    for kind, kit in KITS.items():
        words = kind.replace("_", " ")
        settings = {
            "action": "append",
            "default": [],
            "metavar": "NAME",
            "dest": _destination(kind),
            "help": f"check the {words} registered as NAME, or all of them (repeatable)",
        }
        try:
            group.addoption(kit.option, **settings)
        except (ValueError, argparse.ArgumentError):  # Another pytest plugin has this option.
            group.addoption(f"--jackfield{kit.option[1:]}", **settings)


def pytest_configure(config: pytest.Config) -> None:
    """Look the names up. Raises UsageError for one that is not registered."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    enabled = {
        kind: names
        for kind in KITS
        if (names := config.getoption(_destination(kind), default=None))
    }
    flags: dict[str, list[str]] = {}
    if enabled:
        from ...core.registry import load_plugins

        plugins = load_plugins()
        for kind, names in enabled.items():
            registered = sorted(plugins[kind])
            for name in names:
                if name != "all" and name not in registered:
                    raise pytest.UsageError(
                        f"{KITS[kind].option}: no {kind.replace('_', ' ')} named {name!r} is "
                        f"registered (there are: {', '.join(registered) or 'none'})"
                    )
            flags[kind] = registered if "all" in names else list(dict.fromkeys(names))
    config.stash[CHOSEN] = flags


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    """Return the front module with its classes; other modules are left to pytest."""
    if module_path.name == FRONT.name and module_path.resolve() == FRONT:
        return FrontModule.from_parent(parent, path=module_path)
    return None


class FrontModule(pytest.Module):
    """A test class for each chosen name: the kit of its kind, with `name` set."""

    def collect(self) -> Any:
        for kind, names in self.config.stash[CHOSEN].items():
            kit = getattr(
                importlib.import_module(f"{PACKAGE}.{KITS[kind].module}"), KITS[kind].class_name
            )
            for name in names:
                words = KITS[kind].class_name.removesuffix("Kit")
                title = f"Test{words}_{re.sub(r'[^0-9A-Za-z_]', '_', name)}"
                setattr(self.obj, title, type(title, (kit,), {"name": name}))
        return super().collect()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Explain how to choose if nothing was chosen."""
    if _named(config.args) and not config.stash[CHOSEN]:
        options = ", ".join(f"{kit.option} NAME" for kit in KITS.values())
        terminalreporter.write_line(f"{PACKAGE}: choose what to check with {options}")
