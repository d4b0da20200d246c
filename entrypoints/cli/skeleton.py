"""Writes the package of a new plugin, from the templates in `skeletons/`."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template
from typing import NamedTuple

from ...core.errors import ConfigError
from ...core.hook_versions import API_VERSION
from ...core.spelling import nearest

TEMPLATES = Path(__file__).resolve().parent / "skeletons"
NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([_-][A-Za-z0-9]+)*")
FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "src/$package/__init__.py": "plugin.py",
    "src/$package/$module.py": "$module.py",
    "tests/test_$module.py": "${module}_test.py",
}
"""Path in the package → template; both have placeholders."""


class Kind(NamedTuple):
    hook: str
    use: str
    """A command line that uses the plugin."""
    suffix: str = ""
    argument: str = "registry"
    plugin: str = ""
    """Kind of plugin that it is; "": as its own name says."""


KINDS = {
    "model": Kind("register_models", "jackfield serve CHECKPOINT"),
    "attention-backend": Kind(
        "register_attention_backends", "jackfield serve --attention-backend $name", "Attention"
    ),
    "quantization": Kind(
        "register_quantization", "jackfield serve --quantization $name", "Quantization"
    ),
    "reasoning-parser": Kind(
        "register_reasoning_parsers", "jackfield serve --reasoning-parser $name", "ReasoningParser"
    ),
    "tool-parser": Kind(
        "register_tool_parsers", "jackfield serve --tool-call-parser $name", "ToolParser"
    ),
    "kv-connector": Kind(
        "register_kv_connectors",
        "jackfield serve CHECKPOINT --kv-transfer-config "
        '\'{"kv_connector": "$name", "kv_connector_extra_config": {"path": "/tmp/kv"}}\'',
        "KVConnector",
    ),
    "schedule-policy": Kind(
        "register_schedule_policies", "jackfield serve --scheduling-policy $name", "Policy"
    ),
    "weight-loader": Kind(
        "register_weight_loaders", "jackfield serve CHECKPOINT --load-format $name", "Loader"
    ),
    "latent-attention-backend": Kind(
        "register_latent_attention_backends",
        "jackfield serve CHECKPOINT --attention-backend $name",
        "LatentAttention",
    ),
    "kv-compressor": Kind(
        "register_kv_compressors",
        "jackfield serve --kv-compression $name --kv-compression-ratio 0.5",
        "Compressor",
    ),
    "part": Kind("register_parts", "jackfield serve --parts '{\"$name\": {}}'", "Part"),
    "speculator": Kind(
        "register_speculators",
        'jackfield serve --speculative-config \'{"method": "$name", "num_speculative_tokens": 4}\'',
        "Speculator",
    ),
    "draft-head": Kind(
        "register_speculators",
        "jackfield serve CHECKPOINT --speculative-config "
        '\'{"model": "HEAD", "num_speculative_tokens": 3}\'',
        "Speculator",
        plugin="speculator",
    ),
    "structured-backend": Kind(
        "register_structured_backends",
        "jackfield serve --structured-outputs-config.backend $name",
        "Grammars",
    ),
    "logits-processor": Kind(
        "register_logits_processors", "jackfield serve --logits-processors $name", "Processor"
    ),
    "collectives": Kind(
        "register_collectives",
        "jackfield serve CHECKPOINT --tensor-parallel-size 2 --collectives $name",
        "Collectives",
    ),
    "all2all-backend": Kind(
        "register_all2all_backends",
        "jackfield serve CHECKPOINT --tensor-parallel-size 2 --enable-expert-parallel "
        "--all2all-backend $name",
        "All2All",
    ),
    "adapter-resolver": Kind(
        "register_adapter_resolvers", "jackfield serve CHECKPOINT --enable-lora", "Resolver"
    ),
    "operations": Kind("register_operations", "jackfield serve --operations $name", "Operations"),
    "executor": Kind("register_executors", "jackfield serve --executor $name", "Executor"),
    "command": Kind("register_commands", "jackfield $name", argument="commands"),
}


def write_skeleton(kind: str, name: str, into: Path) -> Path:
    """Write the package; return its folder. Raises ConfigError for an invalid or existing name, and
    OSError.
    """
    if kind.replace("_", "-") not in KINDS:
        near = nearest(kind, KINDS)
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"KIND: {kind!r} is none of {', '.join(KINDS)}{hint}", param="kind")
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"NAME: {name!r} is no name: letters and digits, in words joined by - or _",
            param="name",
        )
    if kind == "model" and (not name.isidentifier() or keyword.iskeyword(name)):
        raise ConfigError(
            f"NAME: {name!r} is no architecture, as config.json's `architectures` has them: "
            "LlamaForCausalLM",
            param="name",
        )
    names = _names(kind.replace("_", "-"), name)
    folder = into / names["distribution"]
    if folder.exists():
        raise ConfigError(f"NAME: {folder} exists already", param="name")
    for path, template in FILES.items():
        source = TEMPLATES / f"{_filled(template, names)}.txt"
        file = folder / _filled(path, names)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_filled(source.read_text(), names))
    return folder


def _names(kind: str, name: str) -> dict[str, str]:
    about = KINDS[kind]
    slug = name.lower().replace("_", "-")
    words = re.split("[_-]", name)
    class_name = "".join(word[0].upper() + word[1:] for word in words)
    return {
        "name": name,
        "kind": kind,
        "title": kind.replace("-", " "),
        "slug": slug,
        "distribution": f"jackfield-{slug}",
        "package": f"jackfield_{slug.replace('-', '_')}",
        "module": kind.replace("-", "_"),
        "attribute": "run" if kind == "command" else class_name + about.suffix,
        "hook": about.hook,
        "argument": about.argument,
        "use": _filled(about.use, {"name": name}),
        "api": str(API_VERSION),
    }


def _filled(text: str, names: dict[str, str]) -> str:
    return Template(text).substitute(names)
