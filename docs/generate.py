"""Writes the reference pages that the code itself is the source of.

    python docs/generate.py           # write docs/reference/*.md and the list of pages in index.md
    python docs/generate.py --check   # exit 1 and name the pages that are out of date

A field's meaning is its `Meta` description or the docstring under it; nothing is written twice.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
import textwrap
import tomllib
import typing
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from jackfield.core import hooks, outputs, pooling_params, protocols
from jackfield.core import sampling_params as params
from jackfield.core.config import EngineConfig, StructuredOutputsConfig
from jackfield.core.data_parallel.metrics import PoolMetrics
from jackfield.core.engine import core as engine_core
from jackfield.core.hook_versions import API_VERSION
from jackfield.core.metrics.adapter_metrics import AdapterCounts, AdapterMetrics
from jackfield.core.metrics.metrics import EngineMetrics
from jackfield.core.metrics.rank_metrics import RankMetrics
from jackfield.core.registry import KINDS, load_plugins
from jackfield.entrypoints.openai.common import protocol
from jackfield.entrypoints.openai.pooling import protocol as pooling_protocol
from jackfield.entrypoints.openai.responses import protocol as responses_protocol
from jackfield.entrypoints.server.frontend_metrics import FrontendMetrics
from jackfield.entrypoints.server.http_metrics import HttpMetrics
from jackfield.entrypoints.struct_fields import described, type_text

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))
from api_page import public_api  # noqa: E402
from cli_page import cli  # noqa: E402
from combinations_page import combinations  # noqa: E402
from markdown_table import table  # noqa: E402
from models_page import models  # noqa: E402
from options_page import options  # noqa: E402
from parsers_page import parsers  # noqa: E402
from routes_page import routes  # noqa: E402

NOTE = "<!-- Written by docs/generate.py from the code. Change the code, then run it. -->\n\n"
FOLDERS = {
    "tutorials": "Tutorials: learn by doing",
    "how-to": "How-to: reach a goal",
    "reference": "Reference: look it up",
    "explanation": "Explanation: understand why",
}


# ---------------------------------------------------------------- fields of structs


def field_docs(cls: type) -> dict[str, str]:
    """Field → the docstring under it."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                assert isinstance(field.target, ast.Name)
                docs[field.target.id] = " ".join(after.value.value.split())
    return docs


def field_rows(cls: Any) -> list[list[str]]:
    """[field, type, default, meaning] of a struct. Raises SystemExit where a meaning is missing."""
    hints = typing.get_type_hints(cls, include_extras=True)
    docs = field_docs(cls)
    rows = []
    for field in msgspec.structs.fields(cls):
        hint = hints[field.name]
        meaning = described(hint) or docs.get(field.name, "")
        if not meaning:
            raise SystemExit(f"{cls.__name__}.{field.name} has no docstring")
        rows.append([f"`{field.name}`", type_text(hint), _default(field), meaning])
    return rows


def _default(field: Any) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()!r}`"
    if field.default is msgspec.NODEFAULT:
        return "required"
    value = field.default
    if isinstance(value, msgspec.Struct):
        return f"`{type(value).__name__}()`"
    return f"`{str(value) if isinstance(value, str) and value else repr(value)}`"


# ---------------------------------------------------------------- pages


def engine_config() -> str:
    """Every engine option."""
    return (
        "# EngineConfig\n\n"
        "Every engine option. In Python: `EngineConfig(max_model_len=4096)`; on the command line: "
        "`jackfield serve --max-model-len 4096` (a field's flag is its name with dashes; "
        "see [cli](cli.md)). An unknown option, a value of the wrong type or out of range, and "
        "options at odds with each other raise `ConfigError` with the field's name.\n\n"
        "Source: [core/config/](../../core/config). What `auto` becomes on this machine is "
        "decided in `core/engine/resolve_config.py` and `core/loading/model_config.py`.\n\n"
        + table(["field", "type", "default", "meaning"], field_rows(EngineConfig))
        + "\n## StructuredOutputsConfig\n\n"
        + f"{inspect.cleandoc(StructuredOutputsConfig.__doc__ or '')} A part's flag is "
        "`--structured-outputs-config.backend`; `--guided-decoding-backend` is the same.\n\n"
        + table(["field", "type", "default", "meaning"], field_rows(StructuredOutputsConfig))
    )


def sampling_params() -> str:
    """What a request may ask for, and what comes back."""
    parts = [
        "# SamplingParams and outputs\n\n",
        "What a request may ask for, and what comes back. Source: "
        "[core/sampling_params.py](../../core/sampling_params.py), "
        "[core/outputs.py](../../core/outputs.py) and "
        "[core/pooling_params.py](../../core/pooling_params.py). "
        "A value out of range raises "
        "`InvalidRequest` with the field's name.\n",
    ]
    for cls in (
        params.SamplingParams,
        params.StructuredOutputsParams,
        outputs.RequestOutput,
        outputs.CompletionOutput,
        outputs.RequestTimings,
        outputs.Logprob,
        pooling_params.PoolingParams,
        outputs.PoolingRequestOutput,
        pooling_params.PoolingOutput,
    ):
        about = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
        parts.append(f"\n## {cls.__name__}\n\n{about}\n\n")
        parts.append(table(["field", "type", "default", "meaning"], field_rows(cls)))
    parts.append("\n## OutputKind\n\n" + inspect.cleandoc(params.OutputKind.__doc__ or ""))
    kinds = _enum_docs(params.OutputKind)
    parts.append("\n\n" + table(["value", "meaning"], [[f"`{k}`", v] for k, v in kinds]))
    limits = ("MAX_N", "MAX_STOP_STRINGS", "MAX_STOP_LENGTH")
    parts.append("\n## Fixed limits\n\n")
    parts.append(table(["name", "value"], [[f"`{n}`", f"`{getattr(params, n)}`"] for n in limits]))
    return "".join(parts)


def _enum_docs(cls: Any) -> list[tuple[str, str]]:
    (body,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(body, ast.ClassDef)
    pairs = zip(body.body, body.body[1:], strict=False)
    return [
        (ast.literal_eval(field.value), ast.literal_eval(after.value))
        for field, after in pairs
        if isinstance(field, ast.Assign) and isinstance(after, ast.Expr)
    ]


def hook_page() -> str:
    """Every hook with its contract."""
    plugins = load_plugins()
    kind_of = {hook: kind for kind, hook in KINDS.items()}
    parts = [
        "# Hooks\n\n",
        "Every hook, who calls it and when, and its contract. "
        "Source, and the page to read first: [core/hooks.py](../../core/hooks.py). The contracts "
        "are in [core/protocols/](../../core/protocols/). How to write a plugin: "
        "[write a plugin](../how-to/write-a-plugin.md).\n\n",
        f"Hook API version: {API_VERSION}, which plugins state as `jackfield_api`.\n\n",
    ]
    rows = []
    for name, function in _hooks():
        kind = kind_of.get(name)
        names = "—" if kind is None else ", ".join(
            f"`{e.name}`" for e in sorted(plugins[kind].entries(), key=lambda e: e.name)
            if e.provenance.distribution == hooks.PROJECT
        ) or "none"  # fmt: skip
        about = inspect.getdoc(function) or ""
        rows.append([f"[`{name}`](#{name})", kind or "—", _when(about), names])
    parts.append(table(["hook", "kind", "called by", "in the box"], rows))
    for name, function in _hooks():
        about = inspect.getdoc(function) or ""
        line = f"def {name}{_signature(function)}: ..."
        if len(line) > WIDTH:
            # As ruff formats it: one parameter has a comma after it, several in a line have not.
            comma = "," if len(inspect.signature(function).parameters) == 1 else ""
            line = line.replace("(", "(\n    ", 1).replace(") ->", f"{comma}\n) ->")
        parts.append(f"\n## {name}\n\n```python\n{line}\n```\n\n")
        parts.append(about + "\n")
        for contract in re.findall(r"`protocols\.(\w+)`", about):
            source = inspect.getsource(getattr(protocols, contract)).rstrip()
            parts.append(f"\n```python\n{source}\n```\n")
    return "".join(parts)


def _hooks() -> list[tuple[str, Any]]:
    return [
        (name, value)
        for name, value in vars(hooks).items()
        if inspect.isfunction(value) and hasattr(value, "jackfield_spec")
    ]


WIDTH = 100
"""Characters of a line of code."""


def _signature(function: Any) -> str:
    return str(inspect.signature(function)).replace("'", "")


def _when(about: str) -> str:
    caller = re.search(r"(?:Used|Called) by ((?:[^.;:(]|\.(?=\w))+)", about.replace("\n", " "))
    if caller is None:
        raise SystemExit(f"a hook's docstring does not say what it is called by: {about!r}")
    return caller[1].strip()


def fields() -> str:
    """Request fields beside OpenAI's and vLLM's. Theirs are recorded in docs/fields.json."""
    known = json.loads((DOCS / "fields.json").read_text())
    parts = [
        "# Request fields, beside OpenAI's and vLLM's\n\n"
        "What becomes of each field that a program written for OpenAI or vLLM may send. "
        f"OpenAI: the fields of its Python package `openai` {known['openai']}; vLLM: those of its "
        "request classes as of 2026, `older` where it had the name before. What each means: "
        "[HTTP API](http-api.md).\n\n"
        + table(["here", ""], [[f"{name}", about] for name, about in OUTCOMES.items()])
    ]
    for route in known["routes"]:
        parts.append(f"\n## {route['title']}\n\n")
        whose = ["OpenAI", "vLLM"] if route["openai"] else ["vLLM"]
        parts.append(table(["field", *whose, "here", ""], _field_rows(route, whose)))
    return "".join(parts)


OUTCOMES = {
    "yes": "it has its effect; a value that cannot have it is refused by the field's name",
    "no effect": "taken and not used",
    "refused": "a request that asks for something with it gets a 400 that says why; null, false, "
    "empty text, lists and objects ask for nothing",
    "ignored": "not known here, as any other name",
}


def _field_rows(route: dict[str, Any], whose: list[str]) -> list[list[str]]:
    """A row for each field of a route, by what becomes of them."""
    places = (protocol, pooling_protocol, responses_protocol)
    (struct,) = {vars(place)[route["struct"]] for place in places if route["struct"] in vars(place)}
    own = {field.name for field in msgspec.structs.fields(struct)}
    refused = {name: why for name, why in protocol.UNSUPPORTED.items() if name not in own}
    refused |= getattr(struct, "REFUSED", {}) | getattr(struct, "UNSUPPORTED", {})
    theirs = {"OpenAI": route["openai"], "vLLM": route["vllm"]}
    rows = []
    for name in own.union(*theirs.values(), route["vllm_older"], route.get("sglang", ())):
        here = "yes" if name in own else "ignored"
        note = route["notes"].get(name, "")
        if name in refused:
            here, note = "refused", re.sub(r"(--[\w.-]+)", r"`\1`", refused[name])
        elif name in protocol.IGNORED and here == "ignored":
            note = "with a log line: " + re.sub(r"(--[\w.-]+)", r"`\1`", protocol.IGNORED[name])
        elif name in route["no_effect"]:
            here = "no effect"
        had = ["yes" if name in theirs[who] else "" for who in whose]
        if name in route["vllm_older"]:
            had[-1] = "older"
        rows.append([name if here == "ignored" else f"`{name}`", *had, here, note])
    return sorted(rows, key=lambda row: (list(OUTCOMES).index(row[-2]), row[0].strip("`")))


def metrics() -> str:
    """What GET /metrics tells."""
    engine_metrics = EngineMetrics("MODEL")
    engine_metrics.observe_stats(
        outputs.EngineStats(
            spec_decode_num_accepted_tokens_per_pos={0: 1}, requests_finished={"stop": 1},
            part_counts={"NAME": 1},
        )
    )  # fmt: skip
    engine_metrics.observe_cache_config(**dict.fromkeys(_cache_facts(), ""))
    engine_metrics.registry.register(FrontendMetrics(0, lambda: 0))
    http_metrics = HttpMetrics()
    http_metrics.count("ROUTE", "GET", 200, 0.0)
    engine_metrics.registry.register(http_metrics)
    engine_metrics.registry.register(
        RankMetrics("MODEL", lambda: [protocols.RankState(0, "HOST", 0, 0, 0)])
    )
    engine_metrics.registry.register(AdapterMetrics("MODEL", 1, AdapterCounts))
    rows = []
    for family in [*engine_metrics.registry.collect(), *PoolMetrics("MODEL", 1).registry.collect()]:
        labels = sorted({k for s in family.samples for k in s.labels} - {"le"})
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.append([f"`{name}`", family.type, ", ".join(labels), family.documentation])
    return (
        "# Metrics\n\n"
        "What the server counts and measures. "
        "`GET /metrics` answers in Prometheus' text format, without an API key. Where the meaning "
        "is the same, a name is vLLM's with the prefix `jackfield:`. Every engine has a registry "
        "of its own. Times are seconds. In Python, `engine.stats()` gives the same counts as "
        "an `EngineStats` (`core/step.py`). Those of front ends are there with "
        "`--api-server-count` alone, those of ranks where an engine has several, those of "
        "adapters (`lora_…`) with `--enable-lora`, those of "
        "`data_parallel` with `--data-parallel-size` alone; there, each engine's metrics have "
        "the label `engine`, its number.\n\n"
        "Source: [core/metrics/metrics.py](../../core/metrics/metrics.py), "
        "[core/metrics/rank_metrics.py](../../core/metrics/rank_metrics.py), "
        "[core/metrics/adapter_metrics.py](../../core/metrics/adapter_metrics.py), "
        "[core/data_parallel/metrics.py](../../core/data_parallel/metrics.py), "
        "[entrypoints/server/frontend_metrics.py](../../entrypoints/server/frontend_metrics.py).\n\n"
        + table(["name", "type", "labels", "meaning"], sorted(rows))
    )


def _cache_facts() -> list[str]:
    """Labels of cache_config_info, as the engine gives them."""
    for node in ast.walk(ast.parse(inspect.getsource(engine_core))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "observe_cache_config":
                return [keyword.arg for keyword in node.keywords if keyword.arg]
    raise SystemExit("core/engine/core.py does not call observe_cache_config any more")


# ---------------------------------------------------------------- the list of pages


def title_and_first_sentence(page: Path) -> tuple[str, str]:
    """A page's heading, and the first sentence under it."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.S).strip()
    title, _, rest = text.partition("\n")
    paragraph = " ".join(rest.strip().split("\n\n")[0].split())
    paragraph = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph)
    sentence = re.match(r".*?\.(?=\s|$)", paragraph)
    return title.removeprefix("# "), sentence[0] if sentence else paragraph


def index(pages: dict[str, str]) -> str:
    """index.md with its list of pages renewed."""
    text = (DOCS / "index.md").read_text()
    parts = []
    for folder, heading in FOLDERS.items():
        parts.append(f"## {heading}\n\n")
        names = {p.name for p in (DOCS / folder).glob("*.md")}
        names |= {Path(name).name for name in pages if name.startswith(f"{folder}/")}
        for name in sorted(names, key=lambda name: (name != "first-server.md", name)):
            title, about = title_and_first_sentence(DOCS / folder / name)
            parts.append(f"- [{title}]({folder}/{name}): {about}\n")
        parts.append("\n")
    begin, end = "<!-- pages -->\n", "<!-- end of pages -->"
    head, _, rest = text.partition(begin)
    return head + begin + "\n" + "".join(parts) + end + rest.partition(end)[2]


# ---------------------------------------------------------------- the README


def families() -> tuple[list[str], list[str]]:
    """Families of language models, and of encoders: what architectures begin with."""
    registry = load_plugins()["model"]
    own = [e.name for e in registry.entries() if e.provenance.distribution == hooks.PROJECT]
    encoders = {_family(name) for name in own if not getattr(registry.load(name), "causal", True)}
    language = {_family(name) for name in own if name.endswith("ForCausalLM")} - encoders
    return sorted(language), sorted(encoders)


def _family(architecture: str) -> str:
    return re.sub(r"(Text)?(For[A-Z]\w+|Model)$", "", architecture)


def readme() -> str:
    """README.md with its counts renewed."""
    plugins = load_plugins()

    def count(kind: str) -> int:
        entries = plugins[kind].entries()
        return sum(e.provenance.distribution == hooks.PROJECT for e in entries)

    language, encoders = families()
    outside = len(list((DOCS.parent / "examples" / "plugins").glob("*/pyproject.toml")))
    text = (DOCS.parent / "README.md").read_text()
    for pattern, sentence in (
        (
            r"\w+ families of language models, \w+ of\s+encoders",
            f"{len(language)} families of language models, {len(encoders)} of encoders",
        ),
        (
            r"\w+ tool-call and \w+ reasoning dialects",
            f"{count('tool_parser')} tool-call and {count('reasoning_parser')} reasoning dialects",
        ),
        (r"\w+ more\]\(examples/plugins\)", f"{outside} more](examples/plugins)"),
        (r"\w+ packages outside the tree\]", f"{outside} packages outside the tree]"),
    ):
        text, changes = re.subn(pattern, sentence, text)
        if changes != 1:
            raise SystemExit(f"README.md does not say once: {pattern}")
    return text


PAGES: dict[str, Callable[[], str]] = {
    "reference/engine-config.md": engine_config,
    "reference/sampling-params.md": sampling_params,
    "reference/cli.md": cli,
    "reference/combinations.md": combinations,
    "reference/hooks.md": hook_page,
    "reference/fields.md": fields,
    "reference/metrics.md": metrics,
    "reference/models.md": lambda: models(table),
    "reference/parsers.md": parsers,
    "reference/public-api.md": public_api,
    "reference/routes.md": routes,
    "reference/vllm-options.md": options,
}


def render() -> dict[str, str]:
    """Page → its text as the code has it now."""
    return {name: NOTE + make() for name, make in PAGES.items()}


def check_installed(pyproject: str, installed: set[str]) -> None:
    """Raise SystemExit if the installation lacks entry points of pyproject.toml, or has more: pages
    that list plugins would be wrong.

    pyproject: its text. installed: names of the entry points of this distribution's plugins.
    """
    declared = set(tomllib.loads(pyproject)["project"]["entry-points"][hooks.PROJECT])
    differing = sorted(declared ^ installed)
    if differing:
        raise SystemExit(
            f"the installed {hooks.PROJECT} has other entry points than pyproject.toml "
            f"({', '.join(differing)}): install it again (pip install --no-deps -e .), then run "
            "this once more"
        )


def installed_plugins() -> set[str]:
    """Return the names of the entry points of this distribution's plugins, as it is installed."""
    points = metadata.entry_points(group=hooks.PROJECT)
    return {point.name for point in points if point.dist and point.dist.name == hooks.PROJECT}


def main() -> int:
    """→ exit status"""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    check_installed((DOCS.parent / "pyproject.toml").read_text(), installed_plugins())
    pages = render()
    stale = []
    for name, text in pages.items():
        path = DOCS / name
        if not path.is_file() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    counted = readme()
    if counted != (DOCS.parent / "README.md").read_text():
        stale.append("../README.md")
        if not check:
            (DOCS.parent / "README.md").write_text(counted)
    listed = index(pages)
    if listed != (DOCS / "index.md").read_text():
        stale.append("index.md")
        if not check:
            (DOCS / "index.md").write_text(listed)
    for name in stale:
        print(f"{'out of date' if check else 'written'}: docs/{name}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
