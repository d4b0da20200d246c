"""The documentation against the code: names and links exist, pages are up to date.

What blocks show is run in tests/docs/test_marked_blocks.py.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from pages import BLOCKS, FENCE, PAGES, ROOM_PAGES, ROOT, name_of

from jackfield import AsyncEngine, EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.core.hook_versions import API_VERSION
from jackfield.core.registry import Plugins, load_plugins
from jackfield.core.scheduling.parts.part import SchedulerPart
from jackfield.core.worker.parts.part import WorkerPart
from jackfield.entrypoints.anthropic import protocol as messages_protocol
from jackfield.entrypoints.bench.engine.session import IN_PROCESS, make_parser
from jackfield.entrypoints.bench.kv_compression import command as compression_options
from jackfield.entrypoints.bench.serve import serve_options
from jackfield.entrypoints.cli.main import COMMANDS
from jackfield.entrypoints.flags import vllm_flags
from jackfield.entrypoints.flags.foreign_options import translated
from jackfield.entrypoints.ollama import protocol as ollama_protocol
from jackfield.entrypoints.openai.common import decoding, protocol
from jackfield.entrypoints.openai.pooling import protocol as pooling_protocol
from jackfield.entrypoints.openai.responses import protocol as responses_protocol
from jackfield.entrypoints.server.app import make_app
from jackfield.entrypoints.server.serve_settings import make_parser as serve_parser
from jackfield.plugins.conformance.options import KITS

GENERATED = "<!-- Written by docs/generate.py"


# ---------------------------------------------------------------- what the code has


def python_files() -> list[Path]:
    """The repository's own: an environment in it has a hundred times as many."""
    own = [path for path in ROOT.iterdir() if not path.name.startswith((".", "build"))]
    return sorted(
        file
        for path in own
        for file in (path.rglob("*.py") if path.is_dir() else [path])
        if file.suffix == ".py"
    )


class Names:
    """Every name in the repository's Python files, of which those are parsed that are asked for."""

    def __init__(self) -> None:
        self.words: set[str] = set()
        self._members: dict[str, set[str]] = {}
        self._bases: dict[str, set[str]] = {}
        self._files: dict[str, list[str]] = {}
        """Class → files that may define it."""
        self._names: dict[str, set[str]] = {}
        for path in python_files():
            relative = path.relative_to(ROOT)
            if "tests/docs" in str(relative):
                continue
            text = path.read_text()
            self.words |= set(re.findall(r"\w+", text))
            for kind in re.findall(r"^class (\w+)", text, re.M):
                self._files.setdefault(kind, []).append(str(relative))

    def of_file(self, file: str) -> set[str]:
        """What a file defines; nothing: it is not there, or not of Python."""
        if file not in self._names:
            path = ROOT / file
            python = path.suffix == ".py" and path.is_file()
            tree = ast.parse(path.read_text()) if python else ast.Module([], [])
            self._names[file] = set(self._names_of(tree))
        return self._names[file]

    def members(self, kind: str) -> set[str] | None:
        """Of the classes of a name; None: there is none."""
        for file in self._files.get(kind, ()):
            self.of_file(file)
        return self._members.get(kind)

    def _names_of(self, tree: ast.Module) -> Iterator[str]:
        for node in tree.body:
            yield from self._defined(node)
            if isinstance(node, ast.ClassDef):
                members = self._members.setdefault(node.name, set())
                self._bases[node.name] = {b.id for b in node.bases if isinstance(b, ast.Name)}
                for inner in ast.walk(node):
                    for name in self._defined(inner):
                        members.add(name)
                        yield f"{node.name}.{name}"

    @staticmethod
    def _defined(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name | ast.Attribute):
                    yield target.id if isinstance(target, ast.Name) else target.attr

    def has_member(self, owner: str, member: str) -> bool:
        """Whether a class of this name, or of a base's name, has the member."""
        kinds, todo = set(), [owner]
        while todo:
            kinds.add(kind := todo.pop())
            if member in (self.members(kind) or ()):
                return True
            todo += self._bases.get(kind, set()) - kinds  # A class may be named like its base.
        return False


@pytest.fixture(scope="module")
def names() -> Names:
    return Names()


def generator() -> ModuleType:
    """docs/generate.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- names

CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")
THEIRS = ("my_package", "path", "owner", "simple_plugin", "name")
"""First parts of paths that belong to the reader."""
CHECKPOINT_FILES = {"config.json", "scores.json"}
OTHERS_NAMES = {
    "OpenAI", "None", "True", "False", "SIGTERM", "SIGINT", "HF_HUB_OFFLINE", "X-Request-Id",
    "OLLAMA_API_KEY", "OLLAMA_BASE_URL", "HF_ENDPOINT", "HF_TOKEN", "HF_HUB_CACHE",
    "AWS_PROFILE", "AWS_ENDPOINT_URL", "GOOGLE_APPLICATION_CREDENTIALS",
    "JSON", "Authorization", "Serving", "X", "PATH", "NAME", "KEY", "ParserEvent",
    # Of Ray, gloo and NCCL.
    "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "GLOO_SOCKET_IFNAME",
    "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "INFO",
}  # fmt: skip


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def looks_like_a_path(code: str) -> bool:
    return bool(PATH.fullmatch(code)) and (
        code.endswith((".py", ".md", ".jsonl", ".toml", ".jinja", "/"))
        or ("/" in code and not code.startswith("/"))
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_on_the_page_exists(page: Path) -> None:
    for code in CODE.findall(prose(page)):
        if not looks_like_a_path(code) or code.split("/")[0] in THEIRS:
            continue
        assert (ROOT / code).exists() or (page.parent / code).exists(), f"no {code}"


# The command line's page has argparse's placeholders; that it is up to date is tested below.
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in ("cli.md", "vllm-options.md")],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_name_on_the_page_exists(page: Path, names: Names) -> None:
    for code in CODE.findall(prose(page)):
        match = re.fullmatch(r"(\w+)((?:\.\w+)*)(\(.*\))?", code)
        if match is None or looks_like_a_path(code) or code in CHECKPOINT_FILES:
            continue
        first, rest = match[1], match[2].split(".")[1:]
        if first in OTHERS_NAMES:
            continue
        if rest and names.members(first) is not None:
            assert names.has_member(first, rest[0]), f"{first} has no {rest[0]}"
        elif "_" in first or (first[0].isupper() and not first.isupper()):
            assert first in names.words, f"nothing is called {first}"


WALKS = [ROOT / "docs/architecture.md", *ROOM_PAGES]
"""Pages with rows `| n | file | runs | …` that follow something through the code."""


def walk(page: Path) -> list[tuple[str, str]]:
    """A page's rows: files, and what runs in them."""
    return re.findall(r"^\| \d+ \| (`[^|]+`) \| ([^|]+) \|", prose(page), re.M)


@pytest.mark.parametrize("page", WALKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_walk_names_what_is_in_each_file(page: Path, names: Names) -> None:
    """What runs is defined in one of the files."""
    for files, runs in walk(page):
        defined = {name for file in CODE.findall(files) for name in names.of_file(file)}
        for name in CODE.findall(runs) if defined else ():
            if name.rpartition(".")[2].startswith("_"):
                continue  # Private: whoever renames it looks for its callers, not for pages.
            assert name in defined, f"{files} does not define {name}"


def test_the_walks_are_found() -> None:
    assert len(walk(ROOT / "docs/architecture.md")) > 40
    assert sum(len(walk(page)) for page in ROOM_PAGES) > 100


@pytest.mark.parametrize("page", WALKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_for_who_edits_the_code_is_short_enough_to_be_read(page: Path) -> None:
    limit = 10 if page.name == "README.md" else 25
    assert page.stat().st_size <= limit * 1024


@pytest.mark.parametrize("page", ROOM_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_room_page_is_linked_from_the_architecture(page: Path) -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    assert f"](../{page.relative_to(ROOT).as_posix()})" in text


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/structure.md"])
def test_every_room_has_its_line(page: str) -> None:
    text = (ROOT / page).read_text()
    rooms = [p for p in (ROOT / "core").iterdir() if (p / "__init__.py").is_file()]
    assert len(rooms) > 6
    table = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    for room in rooms:
        assert any(f"`core/{room.name}/`" in cell for cell in table), room.name


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return a command's flags, and those of its subcommands."""
    flags = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            flags |= set().union(*map(flags_of, action.choices.values()))
    return flags


def known_flags() -> set[str]:
    generator()  # From now on its folder is searched for modules.
    command_parser = importlib.import_module("cli_page").command_parser
    flags = set()
    for command, _ in COMMANDS.values():
        parser = command_parser(command)
        if isinstance(parser, argparse.ArgumentParser):
            flags |= flags_of(parser)
            flags |= set(getattr(parser, "other_options", ()))
    bench = make_parser("run", IN_PROCESS, ("W1",))
    flags |= {
        option for kit in KITS.values() for option in (kit.option, f"--jackfield{kit.option[1:]}")
    }
    flags |= set(serve_options.make_parser()._option_string_actions)
    flags |= set(compression_options.parser()._option_string_actions)
    for program in (ROOT / "examples/benchmarks").rglob("*.py"):
        flags |= set(re.findall(r'"(--[\w-]+)"', program.read_text()))
    return flags | set(bench._option_string_actions)


def test_every_flag_exists() -> None:
    """In prose, and in console commands that call jackfield."""
    flags = known_flags()
    assert "--max-model-len" in flags
    for page in PAGES:
        if page.read_text().startswith(GENERATED):
            continue
        for code in CODE.findall(prose(page)):
            if code.startswith("--") or code.startswith("jackfield "):
                for flag in re.findall(r"(?<!\w)--[\w-]+", code):
                    known = flag in flags or flag in ("--max-modle-len", "--no-deps")
                    assert known, f"{page.name}: {flag}"
    for block in BLOCKS:
        for line in block.text.splitlines():
            if block.language == "console" and re.match(r"\$ (\w+=\w+ )*jackfield ", line):
                for flag in re.findall(r" (--[\w-]+)", line.partition("#")[0]):
                    assert flag in flags, f"{name_of(block)}: {flag}"


# ---------------------------------------------------------------- links


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    text = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} leads nowhere"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", prose(file), re.M)
            assert anchor in {slug(heading) for heading in headings}, f"no heading for {target}"


# ---------------------------------------------------------------- what is generated


def test_pages_of_an_older_installation_are_refused() -> None:
    generated, pyproject = generator(), (ROOT / "pyproject.toml").read_text()
    installed = generated.installed_plugins()
    generated.check_installed(pyproject, installed)
    with pytest.raises(SystemExit, match=r"\(speculators\).*install it again"):
        generated.check_installed(pyproject, installed - {"speculators"})


def test_generated_pages_are_up_to_date() -> None:
    generated = generator()
    pages = generated.render()
    stale = [n for n, text in pages.items() if (ROOT / "docs" / n).read_text() != text]
    if generated.index(pages) != (ROOT / "docs/index.md").read_text():
        stale.append("index.md")
    assert not stale, "run: python docs/generate.py"


def test_http_reference_has_every_route_and_field() -> None:
    text = (ROOT / "docs/reference/http-api.md").read_text()
    engine = AsyncEngine(EngineConfig(), plugins=Plugins())
    for route in make_app(engine).router.routes():
        if route.method == "HEAD":
            continue
        assert route.resource is not None
        path = re.sub(r":[^}]*", "", route.resource.canonical)
        assert f"`{route.method} {path}`" in text, f"{route.method} {path}"
    for kind in (protocol.ChatRequest, protocol.CompletionRequest, protocol.TokenizeRequest,
                 protocol.DetokenizeRequest, protocol.StreamOptions,
                 pooling_protocol.PoolingRequest, pooling_protocol.ClassifyRequest,
                 pooling_protocol.ScoreRequest, pooling_protocol.RerankRequest,
                 responses_protocol.ResponsesRequest, responses_protocol.TextConfig,
                 messages_protocol.MessagesRequest, ollama_protocol.OllamaChatRequest,
                 ollama_protocol.GenerateRequest, ollama_protocol.EmbedRequest,
                 ollama_protocol.EmbeddingsRequest, ollama_protocol.ShowRequest,
                 ollama_protocol.Options):  # fmt: skip
        for field in msgspec.structs.fields(kind):
            assert f"`{field.name}`" in text, f"{kind.__name__}.{field.name}"
    for name in decoding.UNSUPPORTED:
        assert f"`{name}`" in text, name


def test_scores_are_the_recorded_ones() -> None:
    page = (ROOT / "examples/tiny_model/README.md").read_text()
    assert (ROOT / "examples/tiny_model/scores.json").read_text().strip() in page


@pytest.mark.parametrize(
    ("page", "least"), [("README.md", 10), ("docs/explanation/performance.md", 30)]
)
def test_speeds_are_the_recorded_ones(page: str, least: int) -> None:
    text = (ROOT / page).read_text()
    section = text.partition("<!-- numbers from docs/benchmarks -->")[2]
    section = section.partition("<!-- end of numbers -->")[0]
    recorded = [
        json.loads(line)
        for file in (ROOT / "docs/benchmarks").glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    known = {number for record in recorded for number in numbers_in(record)}
    rows = re.findall(r"^\| [^|]+ \| ([\d./ ]+) \| ([\d./ ]+) \| ([\d./ ]+) \|$", section, re.M)
    assert len(rows) >= least
    table = section.strip().splitlines()
    assert all(line.startswith("|") for line in table), "a blank line would end the table"
    assert len(table) == len(rows) + 2
    for own, peer, ratio in rows:
        own, peer, ratio = (cell.split(" / ") for cell in (own, peer, ratio))
        for text in (*own, *peer):
            digits = len(text.partition(".")[2])
            assert any(round(number, digits) == float(text) for number in known), text
        for mine, theirs, share in zip(own, peer, ratio, strict=True):
            assert abs(float(mine) / float(theirs) - float(share)) < 0.006, (mine, theirs)


def numbers_in(value: Any) -> Iterator[float]:
    """Every number of a JSON value."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(part)


def test_the_readme_counts_the_parsers_that_are_there() -> None:
    match = re.search(
        r"\[(\d+) tool-call and (\d+) reasoning dialects\]", (ROOT / "README.md").read_text()
    )
    assert match is not None
    plugins = load_plugins()
    for count, kind in zip(match.groups(), ("tool_parser", "reasoning_parser"), strict=True):
        box = [e for e in plugins[kind].entries() if e.provenance.distribution == "jackfield"]
        assert int(count) == len(box), kind


# ---------------------------------------------------------------- what is there and what is not


RDMA_CONNECTORS = ("nixl", "NixlConnector", "mooncake", "MooncakeConnector")


def is_there(what: str) -> bool:
    """Whether something of which pages say that it is absent, or once said so, can be had: an
    option takes it, and nothing refuses it."""
    options, plugins = EngineConfig.__struct_fields__, load_plugins()
    # Each is found out alone: a parser of all options takes a tenth of a second.
    found: dict[str, Callable[[], bool]] = {
        "several hosts": lambda: "ray" in plugins["executor"],
        "expert parallelism": lambda: (
            "enable_expert_parallel" in options and len(plugins["all2all_backend"]) > 0
        ),
        "pipeline parallelism": lambda: "pipeline_parallel_size" in options,
        "data parallelism": lambda: "data_parallel_size" in options,
        "speculative decoding": lambda: len(plugins["speculator"]) > 0,
        "compaction of KV caches": lambda: len(plugins["kv_compressor"]) > 0,
        "KV connectors": lambda: len(plugins["kv_connector"]) > 0,
        "adapters (LoRA)": lambda: "--enable-lora" not in vllm_flags.MISSING,
        "ColPali": lambda: "ColPaliForRetrieval" in plugins["media_model"],
        "beam search": lambda: "use_beam_search" in protocol.SamplingRequest.__struct_fields__,
        "contexts divided among ranks": lambda: is_taken("--decode-context-parallel-size", "2"),
        "weights in host memory": lambda: is_taken("--cpu-offload-gb", "4"),
        "several engines over several hosts without Ray": lambda: is_taken(
            "--data-parallel-address", "10.0.0.1"
        ),
        "prompts computed by other servers": lambda: "peer_store" in plugins["kv_connector"],
        "caches sent by RDMA": lambda: any(c in plugins["kv_connector"] for c in RDMA_CONNECTORS),
        "KV events": lambda: is_taken("--kv-events-config", "{}"),
        "trees of drafts": lambda: is_taken("--speculative-eagle-topk", "4"),
        "diffusion of texts": lambda: is_taken("--diffusion-config", "{}"),
        "AMD, Intel and TPU devices": lambda: takes(device="xpu") or takes(device="tpu"),
    }
    return found[what]()


def takes(**options: Any) -> bool:
    try:
        EngineConfig(**options)
    except ConfigError:
        return False
    return True


def is_taken(*words: str) -> bool:
    """Whether `jackfield serve` takes an option of vLLM's or SGLang's."""
    return all(line.state != "refused" for line in translated(serve_parser(), words))


def listed_as_absent(page: str, sentence: str) -> list[str]:
    (items,) = re.findall(sentence, (ROOT / page).read_text(), re.S)
    return re.split(r",\s+", items)


def test_what_pages_call_absent_is_absent() -> None:
    """Every item of the lists is computed, so that one that was built meanwhile fails here."""
    absent = listed_as_absent("docs/architecture.md", r"\nAbsent for now, [^:]*: ([^.]+)\.")
    assert [what for what in absent if is_there(what)] == []
    assert absent == ["contexts divided among ranks", "weights in host memory"], "compute it, too"
    readme = (ROOT / "README.md").read_text().partition("\n## Not there yet\n")[2]
    items = re.findall(r"^- \*\*(.+?)\*\*", readme.partition("\n## ")[0], re.M)
    assert items and [what for what in items if is_there(what)] == []
    assert is_there("adapters (LoRA)") and is_there("ColPali")


def test_the_changelog_has_the_version_of_the_hooks() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"The hook API is \[version (\d+)\]", text) == [str(API_VERSION)]


def test_the_page_of_parts_has_all_of_them() -> None:
    """Their halves by class, and the calls of a step."""
    for maker in ("engine.scheduler_parts", "worker.start.parts"):
        importlib.import_module(f"jackfield.core.{maker}")  # They import all halves.
    text = (ROOT / "core/parts/README.md").read_text()
    halves = {kind.__name__ for kind in [*subclasses(SchedulerPart), *subclasses(WorkerPart)]
              if kind.__module__.startswith("jackfield.core.")}  # fmt: skip
    assert len(halves) >= 7
    for name in halves:
        assert re.search(rf"^\|.*`{name}`", text, re.M), name
    calls = {
        name for half in (SchedulerPart, WorkerPart) for name, value in vars(half).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }  # fmt: skip
    missing = {name for name in calls if f"`{name}`" not in text and f".{name}`" not in text}
    assert missing <= CALLS_OF_DETAIL, missing


CALLS_OF_DETAIL = {"chunk_planned", "run_largest", "run_largest_recorded", "run_scratch"}
"""Of parts, which their docstrings alone explain."""


def subclasses(kind: type) -> list[type]:
    return [each for sub in kind.__subclasses__() for each in (sub, *subclasses(sub))]


@pytest.mark.parametrize(
    "what",
    [
        "several hosts", "expert parallelism", "pipeline parallelism", "data parallelism",
        "speculative decoding", "compaction of KV caches", "KV connectors",
    ],
)  # fmt: skip
def test_what_the_readme_promises_is_there(what: str) -> None:
    assert is_there(what)
    words = re.sub(r"\W+", " ", (ROOT / "README.md").read_text().lower())
    assert what.lower().replace(" parallelism", "") in words


# ---------------------------------------------------------------- installing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_installs_the_name_from_an_index(page: Path) -> None:
    """Whoever registers it there would be installed: pages install a clone, or a wheel's path."""
    for line in page.read_text().splitlines():
        assert not re.search(r"pip install [^`\n]*(?<![\w./-])jackfield(?=\[|['\"\s`]|$)", line), (
            line
        )


def make(target: str, folder: Path) -> str:
    """What `make TARGET` would run on a fresh clone."""
    if shutil.which("make") is None:
        pytest.skip("make is not here")
    whole = subprocess.run(
        ["make", "--dry-run", f"VENV={folder}", target],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return whole.partition("lint\n")[0]  # A dry run goes into the target that this one calls.


def test_a_demo_installs_what_it_needs_and_tests_install_more(tmp_path: Path) -> None:
    demo, test = make("demo", tmp_path), make("test", tmp_path)
    assert re.findall(r"-e '(.*)'", demo) == [".[demo]"]
    assert re.findall(r"-e '(.*)'", test) == [".[demo]", ".[test]"]
    for run in (demo, test):
        assert run.count("-m venv") == 1 and run.index(" torch\n") < run.index(".[demo]")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    imports = re.findall(r"^(?:from|import) (\w+)", (ROOT / "examples/demo.py").read_text(), re.M)
    needed = set(imports) - sys.stdlib_module_names
    assert {re.split(r"\W", extra)[0] for extra in extras["demo"]} == needed
