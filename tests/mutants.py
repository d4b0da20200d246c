"""Tests of the conformance kits: each is run over plugins with a planted bug, and has to notice.

A kit runs in a pytest session of its own inside this process, so that importing torch and the rest
is paid for once.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from jackfield.core.hook_versions import API_VERSION
from jackfield.core.hooks import hookimpl
from jackfield.core.registry import KINDS
from jackfield.plugins.conformance.kit import Kit

ANCHOR = Path(__file__).resolve()


class Mutant(NamedTuple):
    """A plugin with a planted bug."""

    subject: Any
    """What is registered."""
    fails: tuple[str, ...]
    """The kit's test functions that fail, all of them. The first is run by `make test`."""
    perhaps: tuple[str, ...] = ()
    """Test functions that may fail, too: it hangs on random texts, or on the order of threads."""
    changes: Mapping[str, Any] = {}
    """Attributes of the kit's subclass that differ from the good plugin's."""


def plugin_of(kind: str, name: str, subject: Any) -> ModuleType:
    """A plugin that registers `subject` under `name`."""
    plugin = ModuleType(f"planted_{kind}")

    def register(registry: Any) -> None:
        registry.add(name, subject, override=True)

    setattr(plugin, KINDS[kind], hookimpl(register))
    plugin.jackfield_api = API_VERSION  # type: ignore[attr-defined]
    return plugin


def kit_of(good: type[Kit], subject: Any, **changes: Any) -> type[Kit]:
    """The good plugin's test class, with `subject` registered under its name."""
    plugin = plugin_of(good.kind, good.name, subject)
    return type("TestMutant", (good,), {"plugin": plugin, "__test__": True, **changes})


class Outcomes:
    """The plugin of an inner pytest session: collects one class, notes what its tests do.

    only: names of the test functions to run; None: all. Of the cases of a function none is run
    after one that failed.
    """

    def __init__(self, tests: type, only: Collection[str] | None = None) -> None:
        self.tests = tests
        self.only = only
        self.by_outcome: dict[str, set[str]] = defaultdict(set)
        self.reasons: dict[str, str] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        config.option.tbstyle = "native"  # pytest's own take as long as the tests that fail.

    def pytest_pycollect_makemodule(self, module_path: Path, parent: Any) -> Any:
        module = ModuleType("planted")
        module.TestPlanted = self.tests  # type: ignore[attr-defined]
        module.__file__ = str(module_path)

        class Planted(pytest.Module):
            def _getobj(self) -> ModuleType:
                return module

        return Planted.from_parent(parent, path=module_path)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, name: str) -> list[Any] | None:
        """None of the others: their cases take longer to collect than one takes to run."""
        left_out = self.only is not None and name.startswith("test_") and name not in self.only
        return [] if left_out else None

    def pytest_runtest_setup(self, item: Any) -> None:
        if item.originalname in self.by_outcome["failed"]:
            pytest.skip("a case of it failed")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any) -> Any:
        report = (yield).get_result()
        if report.when == "call" or report.outcome != "passed":
            self.by_outcome[report.outcome].add(item.originalname)
        if report.failed:
            self.reasons.setdefault(item.originalname, report.longreprtext)


def run_kit(tests: type, only: Collection[str] | None = None) -> Outcomes:
    """Run a test class, or some functions of it."""
    outcomes = Outcomes(tests, only)
    # The last two collect garbage, over and over, all of torch among it.
    plugins = ("terminal", "cacheprovider", "faulthandler", "logging", "pastebin", "junitxml",
               "unraisableexception", "threadexception")  # fmt: skip
    arguments = [str(ANCHOR), "-c", os.devnull, "--rootdir", str(ANCHOR.parent), "--strict-markers"]
    arguments += [word for name in plugins for word in ("-p", f"no:{name}")]
    # Or the checkout, whose root is a package, is imported once more, under its folder's name.
    arguments += ["--confcutdir", str(ANCHOR.parent)]
    arguments += ["-o", "markers=gpu: needs a CUDA device", "-m", "not gpu"]
    names = ("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS")
    before = {name: os.environ.get(name) for name in names}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)  # May name what its plugins know.
    try:
        status = pytest.main(arguments, plugins=[outcomes])
    finally:
        for name, value in before.items():
            _set(name, value)
    assert status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), status
    return outcomes


def _set(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value


def check_quickly(good: type[Kit], mutant: Mutant) -> None:
    """The first of the tests that a mutant fails, fails."""
    outcomes = run_kit(kit_of(good, mutant.subject, **mutant.changes), mutant.fails[:1])
    assert outcomes.by_outcome["failed"] == set(mutant.fails[:1]), dict(outcomes.by_outcome)


def check_wholly(good: type[Kit], mutant: Mutant) -> None:
    """Of all tests of the kit, exactly those fail that the mutant is said to fail."""
    outcomes = run_kit(kit_of(good, mutant.subject, **mutant.changes))
    failed = outcomes.by_outcome["failed"]
    failed = failed - set(mutant.perhaps)
    surprises = {name: outcomes.reasons[name] for name in failed - set(mutant.fails)}
    assert failed == set(mutant.fails), "\n\n".join([str(sorted(failed)), *surprises.values()])


def mutant_tests(good: type[Kit], mutants: Mapping[str, Mutant], *, cheap: bool = False) -> Any:
    """A test class over a table of mutants.

    `make test` has one mutant for each of the kit's tests, and the nightly run all of them.

    cheap: the kit takes so little that a mutant goes through all of it every time; otherwise
    `make test` runs the first test that must fail, and all of the kit is for the nightly run.
    """
    assert len(mutants) >= 8, "too few to tell whether the kit notices anything"
    each = pytest.mark.parametrize("mutant", mutants.values(), ids=mutants)
    firsts: dict[str, str] = {}
    for name, mutant in mutants.items():
        firsts.setdefault(mutant.fails[0], name)
    by_day = pytest.mark.parametrize(
        "mutant",
        [
            pytest.param(m, id=name, marks=[pytest.mark.slow] * (firsts[m.fails[0]] != name))
            for name, m in mutants.items()
        ],
    )

    class TestMutants:
        @by_day
        def test_the_kit_notices(self, mutant: Mutant) -> None:
            (check_wholly if cheap else check_quickly)(good, mutant)

        if not cheap:

            @pytest.mark.slow
            @each
            def test_no_other_test_of_the_kit_fails(self, mutant: Mutant) -> None:
                check_wholly(good, mutant)

        def test_the_kit_passes_what_is_right(self) -> None:
            """All of it, when it is cheap; else what the mutants fail in `make test`."""
            only = None if cheap else {mutant.fails[0] for mutant in mutants.values()}
            outcomes = run_kit(type("TestGood", (good,), {"__test__": True}), only)
            assert not outcomes.by_outcome["failed"], outcomes.reasons

    return TestMutants


def subclass(base: type, **changes: Callable[..., Any] | Any) -> type:
    """A class with some attributes replaced. One that is not there is refused: a bug planted into
    a method that has been renamed would change nothing."""
    unknown = sorted(name for name in changes if not hasattr(base, name))
    assert not unknown, f"{base.__qualname__} has no {', '.join(unknown)}"
    return type(f"Planted{base.__name__}", (base,), changes)
