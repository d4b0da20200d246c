"""Rank and alpha patterns against PEFT's own function, and expressions made to never end."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jackfield.core.errors import ConfigError
from jackfield.plugins.adapters import patterns as patterns_module
from jackfield.plugins.adapters.patterns import MAX_STEPS, Pattern, Patterns

ATOMS = st.sampled_from(
    ["a", "b", "q_proj", "_", "1", ".", r"\.", r"\d", r"\w", r"\W", r"\S", "[ab]", "[^a]", "[a-q]",
     r"[\d_]", "[]a]", "[a-]", "^", "$", r"\b", r"\B", r"\A", r"\Z", "{", "}", "{1}", "-", r"\-",
     "|", "layers", "(", ")", "(?:", ")|(", "*", "+", "?", "{2}", "{1,}", "{,2}", "{,}", "{0}",
     "{0,1}", "{2,1}", "*?", "]", "["]
)  # fmt: skip
EXPRESSIONS = st.lists(ATOMS, max_size=8).map("".join)
NAMES = st.lists(
    st.sampled_from(["a", "b", "q_proj", "1", "_", "aab", "layers", "{", "-", ".", "é", "٣"]),
    min_size=1, max_size=7,
).map("".join)  # fmt: skip


def of_re(function: Any, expression: str, name: str) -> bool | None:
    """Return what Python's `re` says; None if it takes the expression for wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(expression, name) is not None
        except re.error:
            return None


@settings(max_examples=400, deadline=None)
@given(EXPRESSIONS, NAMES)
@example("a{,}", "aaa")
@example("(a|b)*_", "ab_b")
@example("a)|(b", "ax")
def test_an_expression_matches_as_in_python(expression: str, name: str) -> None:
    try:
        pattern = Pattern(expression)
    except ValueError:
        # Only wrong ones, and groups of the forms that are left out.
        wrong = of_re(re.match, expression, name) is None
        assert wrong or re.search(r"[*+?}][*+?{]|\^[*+?{]|\$[*+?{]|\\[AZbB][*+?{]", expression)
        return
    assert pattern.matches(name) == of_re(re.match, expression, name)
    assert pattern.matches(name, whole=True) == of_re(re.fullmatch, expression, name)


@settings(max_examples=200, deadline=None)
@given(st.lists(EXPRESSIONS, max_size=4), NAMES)
@example(["proj", "q_proj"], "layers.1.q_proj")
@example(["^q_proj", "^layers.*"], "layers.1.q_proj")
@example([r"layers\.[0]\..*q_proj"], "layers.0.a.q_proj")
@example(["1.q_proj", "q_proj"], "a.1.q_proj")
def test_the_first_key_that_matches_is_that_of_peft(keys: list[str], name: str) -> None:
    from peft.utils.other import get_pattern_key  # Late: every process collects this file.

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patterns = Patterns(keys, "rank_pattern")
            found = patterns.key_of(name)
    except ConfigError as error:
        assert error.param == "rank_pattern"
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # PEFT returns the name itself if no key matches.
        assert get_pattern_key([*keys, re.escape(name)], name) == (
            re.escape(name) if found is None else found
        )


@pytest.mark.parametrize(
    "key", ["(a+)+b", "(a|a)*b", "(.*)*x", "(a*)*(a*)*(a*)*c", "(?:a?){60}a{60}x"]
)
def test_no_expression_makes_a_match_long(key: str) -> None:
    patterns = Patterns([key], "rank_pattern")
    assert patterns.key_of("a" * 500) is None
    assert patterns._steps < MAX_STEPS // 4


@pytest.mark.parametrize(
    "key",
    [
        r"(a)\1+",
        "a(?=b)",
        "(?i)a*",
        "a++b",
        "(",
        "a" * 513,
        "((a{256}){256}){256}",
        "(" * 300 + "*",
    ],
    ids=lambda key: key[:12],
)  # fmt: skip
def test_what_needs_backtracking_is_refused(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Patterns([key], "alpha_pattern")
    assert caught.value.param == "alpha_pattern"


def test_all_matches_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns_module, "MAX_STEPS", 500_000)
    patterns = Patterns([".*" * 200 + f"x{number}" for number in range(40)], "rank_pattern")
    with pytest.raises(ConfigError) as caught:
        for number in range(1000):
            patterns.key_of(f"{'a.' * 200}{number}")
    assert caught.value.param == "rank_pattern"
