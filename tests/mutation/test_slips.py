"""The slips that are found in a piece of code, and the tests that are chosen for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from choice import Chooser, in_turn
from slips import slips_of

ROOT = Path(__file__).resolve().parents[2]


def changed(source: str, kind: str) -> set[str]:
    """The file after each slip of one kind."""
    slips = slips_of("core/x.py", source.encode())
    return {slip.applied(source.encode()).decode() for slip in slips if slip.kind == kind}


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("boundary", "a = 'é' < b <= c  # <", {"a = 'é' <= b <= c  # <", "a = 'é' < b < c  # <"}),
        ("and, or", "a = (b and # or\n c)", {"a = (b or # or\n c)"}),
        ("not", "a = not (b)", {"a =  (b)"}),
        ("min, max", "a = min(b, 3)", {"a = max(b, 3)"}),
        ("arguments", "f(a, b.c, b.d, 1)", {"f(a, b.d, b.c, 1)"}),
        ("arguments", "max(a, b)", set()),
        ("statement", "f(\n 1)\na += 1", {"pass\na += 1", "f(\n 1)\npass"}),
        ("statement", "logger.info('a')", set()),
        ("early exit", "if a:\n return 1\nb", {"if a:\n pass\nb"}),
        ("check", "if a:\n raise ValueError(b)", {"if a:\n pass"}),
        ("handler", "try: f()\nexcept E: g()", {"try: f()\nexcept E: raise"}),
        ("finally", "try: f()\nfinally:\n g()\n h()", {"try: f()\nfinally:\n pass"}),
        ("default", "def f(a: int = 1, *, b=True): ...", {
            "def f(a: int = 2, *, b=True): ...", "def f(a: int = 1, *, b=False): ...",
        }),
        ("default", "class A:\n a: float = 40.0", {"class A:\n a: float = 80.0"}),
        ("constant", "def f():\n a[1]", {"def f():\n a[0]", "def f():\n a[2]"}),
        ("constant", "def f(a: Literal[1]) -> A[2]:\n raise ValueError(3)", set()),
    ],
)  # fmt: skip
def test_a_kind_of_slip(kind: str, before: str, after: set[str]) -> None:
    assert changed(before, kind) == after


def test_a_slip_keeps_its_key_when_lines_are_added_before_it() -> None:
    source = b"if a < b:\n    c += 1\nif a < b:\n    c += 1\n"
    keys = [slip.key for slip in slips_of("core/x.py", source)]
    assert len(set(keys)) == len(keys) == 4
    assert [slip.key for slip in slips_of("core/x.py", b"import d\n\n" + source)] == keys
    assert not set(keys) & {slip.key for slip in slips_of("core/y.py", source)}


def test_slips_of_the_package_are_programs() -> None:
    file = "core/output_parsing/stop_strings.py"
    source = (ROOT / file).read_bytes()
    slips = slips_of(file, source)
    assert len({slip.kind for slip in slips}) >= 5
    for slip in slips:
        compile(slip.applied(source), file, "exec")


def test_directories_are_served_in_turn() -> None:
    assert in_turn([["a", "b", "c"], ["d"], ["e", "f"]]) == ["a", "d", "e", "b", "f", "c"]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("core/cache/block_pool.py", "tests/core/cache/test_block_pool.py"),
        ("entrypoints/http/auth/usage.py", "tests/entrypoints/test_tenants.py"),
        ("plugins/speculators/ngram.py", "tests/plugins/speculators/test_ngram.py"),
    ],
)
def test_the_tests_of_a_module_are_among_the_first(file: str, expected: str) -> None:
    slip = slips_of(file, (ROOT / file).read_bytes())[0]
    assert expected in Chooser(ROOT).of(slip)[:3]
