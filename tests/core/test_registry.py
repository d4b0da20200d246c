"""Plugins that misbehave, and what the registries remember of each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
from installing import Install

from jackfield import hookimpl
from jackfield.core import hook_versions, hooks, protocols
from jackfield.core.errors import PluginError
from jackfield.core.hook_versions import API_VERSION
from jackfield.core.protocols.logits_processors import LogitsProcessor
from jackfield.core.registration.contracts import CONTRACTS
from jackfield.core.registry import (
    KINDS,
    NameConflict,
    ParserMarks,
    Plugins,
    Provenance,
    Registry,
    load_plugins,
)

GOOD = """
    @hookimpl
    def register_tool_parsers(registry):
        registry.add("good", "no_such_module:Parser", priority=3, help="of a test")
"""


def test_an_installed_plugin_is_found_with_where_it_came_from(install: Install) -> None:
    install("goods", GOOD, version="4.2")
    plugins = load_plugins()
    (entry,) = [e for e in plugins["tool_parser"].entries() if e.name == "good"]
    assert entry.provenance == Provenance("goods", "4.2", "goods-point")
    assert (entry.priority, entry.help) == (3, "of a test")
    assert plugins["tool_parser"].entries()[0] == entry, "the highest priority comes first"
    assert plugins.failed == []


def test_a_reference_is_imported_at_its_first_use_and_its_failure_reported(
    install: Install,
) -> None:
    install("goods", GOOD)
    plugins = load_plugins()
    with pytest.raises(PluginError, match=r"'good' of goods .*no_such_module:Parser.*ModuleNot"):
        plugins["tool_parser"].load("good")


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("raise RuntimeError('bang')", "bang"),
        ("import no_such_module", "no_such_module"),
        ("def (", "SyntaxError"),
        ("@hookimpl\ndef register_attention_backends(registry): registry.nonsense()", "nonsense"),
        ("@hookimpl\ndef register_attention_backends(wrong_argument): pass", "wrong_argument"),
        ("@hookimpl\ndef register_unknown_things(registry): pass", "register_unknown_things"),
    ],
)
def test_a_failing_plugin_is_left_out_whole_and_the_others_load(
    install: Install, code: str, word: str
) -> None:
    first = "@hookimpl\ndef register_tool_parsers(registry): registry.add('half', 'a:b')\n"
    install("bad", first + code)
    install("goods", GOOD)
    plugins = load_plugins()
    (failed,) = plugins.failed
    assert failed.provenance.distribution == "bad"
    assert word in failed.error + failed.traceback
    assert "half" not in plugins["tool_parser"]
    assert {"good", "hermes"} <= set(plugins["tool_parser"])


def test_plugins_shows_the_failed_one(install: Install, tmp_path: Path) -> None:
    install("bad", "raise RuntimeError('bang')")
    install("goods", GOOD, version="4.2")
    code = "import sys; from jackfield.entrypoints.cli.main import main; sys.exit(main())"
    completed = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}",
         "plugins", "--no-check"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    lines = completed.stdout.splitlines()
    assert any("good" in line and "goods" in line and "4.2" in line for line in lines), completed
    assert any("bad" in line and "bang" in line for line in lines), (
        completed.stdout + completed.stderr
    )


def test_only_the_named_plugins_load_and_an_absent_one_stops_the_start(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("bad", "raise RuntimeError('bang')")
    install("goods", GOOD)
    plugins = load_plugins(only=["goods"])
    assert "good" in plugins["tool_parser"] and "hermes" in plugins["tool_parser"]
    assert plugins.failed == []
    monkeypatch.setenv("JACKFIELD_PLUGINS", "bad")
    with pytest.raises(PluginError, match="bang"):
        load_plugins()
    monkeypatch.setenv("JACKFIELD_PLUGINS", "goods, absent")
    with pytest.raises(PluginError, match="no such plugin installed: absent"):
        load_plugins()


@pytest.mark.parametrize("value", ["builtin", " Builtin ,", "builtin,goods"])
def test_builtin_names_jackfields_own_plugins_alone(
    install: Install, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    install("goods", GOOD)
    monkeypatch.setenv("JACKFIELD_PLUGINS", value)
    plugins = load_plugins()
    assert ("good" in plugins["tool_parser"]) is ("goods" in value)
    assert "hermes" in plugins["tool_parser"]
    monkeypatch.setenv("JACKFIELD_PLUGINS", "builtins")
    with pytest.raises(PluginError, match="no such plugin installed: builtins"):
        load_plugins()


ADOPTED = """
jackfield_api = 3
@hookimpl
def register_models(registry):
    registry.add("Qwen3ForCausalLM", "mine:Model")
@hookimpl
def register_configs(registry):
    registry.add("qwen3", "mine:Config")
@hookimpl
def register_tool_parsers(registry):
    registry.add("hermes", "mine:Parser")
@hookimpl
def register_structured_backends(registry):
    registry.add("xgrammar", "mine:Backend")
"""


def test_a_family_that_jackfield_has_adopted_stays_the_plugins(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("older", ADOPTED)
    names = {
        "model": "Qwen3ForCausalLM", "config": "qwen3", "tool_parser": "hermes",
        "structured_backend": "xgrammar",
    }  # fmt: skip
    plugins = load_plugins()
    for kind, name in names.items():
        assert plugins[kind].entry(name).provenance.distribution == "older"
        (line,) = [m for m in caplog.messages if f"{kind} {name!r}" in m]
        assert "older" in line and "--no-plugin" in line and "override=True" in line
    caplog.clear()
    own = load_plugins(disable=["older"])
    assert {own[kind].entry(name).provenance.distribution for kind, name in names.items()} == {
        "jackfield"
    }
    install("parser", ADOPTED.replace("register_models", "register_weight_loaders"))
    with pytest.raises(NameConflict, match="--no-plugin"):
        load_plugins(disable=["older"])
    install("meant", ADOPTED.replace('")', '", override=True)'))
    caplog.clear()
    meant = load_plugins(disable=["older", "parser"])
    assert meant["model"].entry("Qwen3ForCausalLM").provenance.distribution == "meant"
    assert not [m for m in caplog.messages if "takes the place" in m]


@pytest.mark.parametrize("name", ["goods", "goods-point", "GOODS_point"])
def test_a_plugin_is_left_out_by_distribution_or_entry_point(install: Install, name: str) -> None:
    install("goods", GOOD)
    plugins = load_plugins(disable=[name])
    assert "good" not in plugins["tool_parser"]
    assert [(p.provenance.distribution, p.error) for p in plugins.unwanted] == [
        ("goods", "disabled")
    ]


def test_disabling_an_unknown_plugin_is_reported_with_the_nearest_name(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("goods", GOOD)
    assert "good" in load_plugins(disable=["gods"])["tool_parser"]
    assert "no plugin gods to leave out; did you mean 'goods'?" in caplog.text


def test_a_bad_reference_leaves_out_its_plugin_and_no_other(install: Install) -> None:
    install(
        "bad", "@hookimpl\ndef register_attention_backends(registry): registry.add('x', 'no colon')"
    )
    install("goods", GOOD)
    plugins = load_plugins()
    assert [failed.provenance.distribution for failed in plugins.failed] == ["bad"]
    assert "good" in plugins["tool_parser"]


def test_a_plugin_that_exits_when_imported_stops_no_other(install: Install) -> None:
    install("bad", "raise SystemExit(3)")
    assert [failed.error for failed in load_plugins().failed] == ["SystemExit: 3"]


NEWER = API_VERSION + 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (f"jackfield_api = {NEWER}", f"built for hook API {NEWER}, .* update Jackfield"),
        (
            f"from jackfield import no_such_thing\njackfield_api: int = {NEWER}",
            f"built for hook API {NEWER}",
        ),
        ("jackfield_api = 0", "built for hook API 0, .* update the plugin"),
        ("jackfield_api = '1'", "jackfield_api: '1' is no hook API version"),
        ("jackfield_api = True", "jackfield_api: True is no hook API version"),
    ],
)
def test_a_plugin_for_another_hook_api_is_left_out_with_a_clear_line(
    install: Install, code: str, message: str
) -> None:
    install("other", code + GOOD.replace("\n    ", "\n"))
    install("current", f"jackfield_api = {API_VERSION}" + GOOD.replace("\n    ", "\n"))
    plugins = load_plugins()
    (failed,) = plugins.failed
    assert failed.provenance.distribution == "other"
    assert re.search(message, failed.error), failed.error
    assert plugins["tool_parser"].entries()[0].provenance.distribution == "current"
    with pytest.raises(PluginError, match=message):
        load_plugins(only=["other"])


PARSER = GOOD.replace("\n    ", "\n")
EXECUTOR = "@hookimpl\ndef register_executors(registry): registry.add('mine', 'os:getcwd')\n"


SILENT = (
    "it states no jackfield_api, which counts as hook API 1, and",
    f"if it is written for that, set jackfield_api = {API_VERSION} in module executors_plugin, "
    "else update the plugin",
)


@pytest.mark.parametrize(
    ("stated", "built", "do"),
    [("", *SILENT), ("1", "it is built for hook API 1,", "update the plugin")],
)
def test_a_plugin_for_the_first_hook_api_runs_where_nothing_that_it_uses_has_changed(
    install: Install, stated: str, built: str, do: str
) -> None:
    api = f"jackfield_api = {stated}\n" if stated else ""
    install("goods", api + PARSER)
    install("executors", api + EXECUTOR)
    plugins = load_plugins()
    assert "good" in plugins["tool_parser"] and "mine" not in plugins["executor"]
    assert [(failed.provenance.distribution, failed.error) for failed in plugins.failed] == [(
        "executors",
        f"{built} this Jackfield has {API_VERSION}, which changed register_executors (in 3): {do}",
    )]  # fmt: skip


def test_a_class_that_states_no_hook_api_is_named() -> None:
    class Silent:
        @hookimpl
        def register_executors(self, registry: Any) -> None:
            registry.add("mine", "os:getcwd")

    with pytest.raises(PluginError, match=r"set jackfield_api = \d+ in class .*\.Silent, else"):
        load_plugins(extra=[Silent()])


def test_a_plugin_that_has_skipped_versions_is_told_the_last_one_that_changed_its_hooks(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("both", "jackfield_api = 2\n" + EXECUTOR + PARSER)
    monkeypatch.setattr(hook_versions, "API_VERSION", 4)
    changed = {
        2: ("register_executors",),
        3: ("register_attention_backends",),
        4: ("register_tool_parsers",),
    }
    monkeypatch.setattr(hook_versions, "CHANGED_HOOKS", changed)
    (failed,) = load_plugins().failed
    assert failed.error.endswith(
        "has 4, which changed register_tool_parsers (in 4): update the plugin"
    )
    monkeypatch.setitem(changed, 4, ())
    assert load_plugins().failed == []


def test_an_old_plugin_that_fails_to_import_says_both(install: Install) -> None:
    install("old", "jackfield_api = 1\nfrom jackfield import no_such_thing\n")
    install("plain", "import no_such_module\n")
    errors = {failed.provenance.distribution: failed.error for failed in load_plugins().failed}
    assert errors["old"].startswith("it is built for hook API 1, this Jackfield has ")
    assert "update the plugin (ImportError: " in errors["old"]
    assert errors["plain"] == "ModuleNotFoundError: No module named 'no_such_module'"


def test_the_page_on_versions_names_every_change() -> None:
    page = Path(hooks.__file__).parents[1] / "docs" / "reference" / "api-versions.md"
    sections = re.split(r"^## Version (\d+)$", page.read_text(), flags=re.M)
    texts = dict(zip(map(int, sections[1::2]), sections[2::2], strict=True))
    assert sorted(texts) == list(range(1, API_VERSION + 1))
    assert set(hook_versions.CHANGED_HOOKS) == set(range(2, API_VERSION + 1))
    for version, changed in hook_versions.CHANGED_HOOKS.items():
        assert set(re.findall(r"`(register_\w+|step_finished)`", texts[version])) >= set(changed)


FIFTY = """
import importlib, sys, time
import jackfield.core.registry as registry
began = time.process_time()
for number in range(50):
    importlib.import_module(f"plain{number}")
imported = time.process_time()
plugins = registry.load_plugins()
took = time.process_time() - imported
found = [name for name in plugins["tool_parser"] if name.startswith("many")]
print(took / (imported - began), len(found), "torch" in sys.modules)
"""


def test_fifty_plugins_are_found_in_little_more_time_than_their_imports_take(
    install: Install, tmp_path: Path
) -> None:
    """Beside importing fifty modules like theirs, in the same process; without torch.

    The best of five fresh processes. Compiled once, as installed plugins are. Usually some 3 times;
    beside busy processes 6 were seen.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for number in range(50):
        install(f"many{number}", GOOD.replace('"good"', f'"many{number}"'))
        shutil.copy(tmp_path / f"many{number}_plugin.py", tmp_path / f"plain{number}.py")
    best = inf
    for _ in range(5):
        completed = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{FIFTY}"],
            capture_output=True, text=True, timeout=300, check=True, env=environment,
        )  # fmt: skip
        ratio, actual, torch = completed.stdout.split()
        assert (actual, torch) == ("50", "False")
        best = min(best, float(ratio))
    assert best < 10, f"{best:.1f} times the time of their imports"


def test_two_installed_plugins_of_one_name_stop_the_start(install: Install) -> None:
    install("goods", GOOD)
    install("others", GOOD)
    with pytest.raises(PluginError, match=r"'good' is registered twice: by goods .* by others"):
        load_plugins()
    assert "good" in load_plugins(disable=["others"])["tool_parser"]


@pytest.mark.parametrize("reference", ["module", "a:b:c", ""])
def test_a_reference_is_module_and_attribute(reference: str) -> None:
    with pytest.raises(PluginError, match="is not 'module:attribute'"):
        Plugins()["model"].add("mine", reference)


def plugin_of(kind: str, reference: object) -> object:
    """A plugin that registers `reference` as "mine"."""

    def register(registry: Any) -> None:
        registry.add("mine", reference)

    def register_command(commands: Any) -> None:
        register(commands)

    implementation = register_command if kind == "command" else register
    marked = {KINDS[kind]: staticmethod(hookimpl(implementation))}
    return type("Plugin", (), {"jackfield_api": API_VERSION, **marked})()


class Options(msgspec.Struct):
    depth: int = 3


class PlainProcessor(LogitsProcessor):
    """Leaves logits as they are."""

    def __init__(self, setup: Any) -> None:
        self.setup = setup

    def start(self, *args: Any, **options: Any) -> bool:
        return False

    def apply(self, *args: Any, **options: Any) -> None:
        return None


def example(kind: str) -> object:
    """Something that a name of this kind may stand for: what is in the box, or what is simplest."""
    box = load_plugins()[kind].entries()
    if box:
        return box[0].reference
    simplest = {
        "options": Options, "config": "transformers:PretrainedConfig",
        "logits_processor": PlainProcessor,
    }  # fmt: skip
    return simplest.get(kind, "builtins:len")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_registered_and_found(kind: str) -> None:
    plugins = load_plugins(extra=[plugin_of(kind, example(kind))])
    assert callable(plugins[kind].load("mine"))
    with pytest.raises(PluginError, match=f"no {kind.replace('_', ' ')} named"):
        Plugins()[kind].load("mine")


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_stands_for_none_is_refused_in_every_kind(kind: str) -> None:
    plugins = load_plugins(extra=[plugin_of(kind, None)])
    with pytest.raises(PluginError, match=r"'mine' of .* is none: it is None"):
        plugins[kind].load("mine")


@pytest.mark.parametrize("kind", CONTRACTS)
def test_a_class_without_a_kinds_methods_is_refused_and_they_are_named(kind: str) -> None:
    class Empty:
        pass

    if kind == "command":
        plugins = load_plugins(extra=[plugin_of(kind, Empty())])
    else:
        plugins = load_plugins(extra=[plugin_of(kind, Empty)])
    contract = CONTRACTS[kind]
    with pytest.raises(PluginError) as caught:
        plugins[kind].load("mine")
    assert "'mine' of (given by the caller) is none: it " in str(caught.value)
    for name in (*contract.required, *contract.one_of, contract.base.replace(":", ".")):
        assert name in str(caught.value)


@pytest.mark.parametrize("kind", CONTRACTS)
def test_what_a_kind_must_have_is_in_its_protocol(kind: str) -> None:
    contract = CONTRACTS[kind]
    place, _, name = contract.of.rpartition(".")
    if not contract.required or place != "protocols":
        return
    declared = set(dir(getattr(protocols, name))) | set(getattr(protocols, name).__annotations__)
    one_of = set(contract.one_of) - set(dir(protocols.PoolingModel))
    assert set(contract.required) | one_of <= declared


def test_everything_in_the_box_keeps_its_contract() -> None:
    plugins = load_plugins()
    for kind in CONTRACTS:
        for name in plugins[kind]:
            assert plugins[kind].load(name) is not None


def test_options_without_a_default_are_refused() -> None:
    class Undecided(msgspec.Struct):
        path: str

    plugins = load_plugins(extra=[plugin_of("options", Undecided)])
    with pytest.raises(PluginError, match="its field path has no default"):
        plugins["options"].load("mine")


def test_an_override_replaces_what_was_loaded_already() -> None:
    plugins = load_plugins()
    plugins["tool_parser"].load("hermes")
    plugins["tool_parser"].add("hermes", plugins["tool_parser"].load("jamba"), override=True)
    assert plugins["tool_parser"].load("hermes") is plugins["tool_parser"].load("jamba")


# ---------------------------------------------------------------- hooks that would do nothing

NO_EFFECT = [
    (
        "@hookimpl\nasync def register_tool_parsers(registry): registry.add('half', 'a:b')",
        "register_tool_parsers: it is `async def`",
    ),
    (
        "@hookimpl\nasync def register_routes(app, engine): pass",
        "register_routes: it is `async def`",
    ),
    (
        "@hookimpl\ndef request_finished(output): yield",
        "request_finished: it yields",
    ),
    (
        "@hookimpl\ndef register_tool_parser(registry): pass",
        "register_tool_parser: there is no such hook; did you mean 'register_tool_parsers'?",
    ),
    (
        "@hookimpl\ndef register_tokenizers(registry): pass",
        "register_tokenizers: there is no such hook",
    ),
    (
        "async def add(registry): registry.add('half', 'a:b')\n"
        "@hookimpl\ndef register_tool_parsers(registry): return add(registry)",
        "register_tool_parsers: it returns a coroutine, which is never awaited",
    ),
]


@pytest.mark.parametrize(("code", "message"), NO_EFFECT)
def test_a_hook_that_could_not_run_leaves_out_its_plugin(
    install: Install, caplog: pytest.LogCaptureFixture, code: str, message: str
) -> None:
    install("bad", code)
    plugins = load_plugins()
    (failed,) = plugins.failed
    assert message in failed.error
    assert f"plugin bad-point of bad 1.0 is left out: {message}" in caplog.text
    assert "half" not in plugins["tool_parser"]
    with pytest.raises(PluginError, match=r"bad-point of bad 1\.0 failed"):
        load_plugins(only=["bad"])


REMARKS = [
    (
        "def register_attention_backends(registry): registry.add('half', 'a:b')",
        "register_attention_backends has no @hookimpl, so it is not called",
    ),
    (
        "def register_tool_parser(registry): pass",
        "register_tool_parser is no hook and has no @hookimpl, so it is not called; did you mean "
        "'register_tool_parsers'?",
    ),
    ("x = 1", "it has no hooks (functions marked @hookimpl), so it plugs in nothing"),
    (
        "@hookimpl\ndef register_attention_backends(registry): pass",
        "it registers no name and listens to no event, so it plugs in nothing",
    ),
]


@pytest.mark.parametrize(("code", "message"), REMARKS)
def test_probable_mistakes_of_a_plugin_are_reported(
    install: Install, caplog: pytest.LogCaptureFixture, code: str, message: str
) -> None:
    install("odd", code)
    install("goods", GOOD)
    plugins = load_plugins()
    assert message in plugins.loaded["odd:odd-point"].remarks
    assert f"plugin odd-point of odd 1.0: {message}" in caplog.text
    assert plugins.loaded["goods:goods-point"].remarks == ()


def test_helpers_of_a_plugin_are_no_hooks(install: Install) -> None:
    install("goods", "def register_all(x): pass\ndef helper(): pass\n" + textwrap.dedent(GOOD))
    assert load_plugins().loaded["goods:goods-point"].remarks == ()


def test_a_heavy_import_is_attributed_to_its_plugin(install: Install, tmp_path: Path) -> None:
    install("heavy", "import torch\n" + textwrap.dedent(GOOD))
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from jackfield.core.registry import load_plugins\n"
        "loaded = load_plugins().loaded.values()\n"
        "print([p.provenance.distribution for p in loaded if p.heavy])\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert completed.stdout.strip() == "['heavy']"
    assert "plugin heavy-point of heavy 1.0 imports torch at every start" in completed.stderr


async def test_a_listener_that_fails_is_logged_and_the_next_one_is_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    called = []

    class Bad:
        @hookimpl
        def engine_started(self, engine: Any) -> None:
            called.append("bad")
            raise RuntimeError("bang")

    class Good:
        @hookimpl
        async def engine_started(self) -> None:
            called.append("good")

    plugins = load_plugins(
        extra=[
            Good(),
            Bad(),
        ]
    )
    await plugins.emit("engine_started", engine=None)
    assert sorted(called) == ["bad", "good"]
    assert "bang" in caplog.text


def test_older_arguments_of_a_parser_become_its_marks() -> None:
    """For one version, with a warning; what is no field of them is refused, and so is `extra` of
    another kind."""
    registry: Registry[Any] = Registry("tool_parser")
    with pytest.warns(DeprecationWarning, match="marks, declaration belong into extra="):
        registry.add("old", "mine:Parser", marks=("<call>",), declaration="template")
    registry.add("new", "mine:Parser",
                 extra=ParserMarks(marks=("<call>",), declaration="template"))  # fmt: skip
    assert registry.entry("old").parser_marks == registry.entry("new").parser_marks
    assert registry.entry("new").parser_marks.marks == ("<call>",)
    with pytest.raises(TypeError, match="takes no argument mark "):
        registry.add("typo", "mine:Parser", mark=("<call>",))
    with pytest.raises(TypeError, match="takes no argument marks "):
        registry.add("both", "mine:Parser", marks=("<call>",), extra=ParserMarks())
    with pytest.raises(TypeError, match="takes no argument marks "):
        Registry("model").add("other", "mine:Model", marks=("<call>",))
    with pytest.raises(PluginError, match="extra is ParserMarks, and takes nothing"):
        Registry("model").add("other", "mine:Model", extra=ParserMarks())
