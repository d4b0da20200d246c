"""Patterns of a checkpoint match as in Python's `re`, in whatever pieces the text comes, and in
linear time."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from jackfield.plugins.parsing.regex_program import MAX_NODES, Program, parse, without_end
from jackfield.plugins.parsing.regex_search import Match, Pattern, Search, pattern_set

ATOMS = ["a", "b", "c", r"\s", "[ab]", "[^a]", ".", r"\w", " ", r"\x62", r"\|"]


def pattern(source: str, limit: int | None = None) -> Pattern:
    return Pattern(Program(parse(source)), limit)


def random_source(chance: random.Random, depth: int, names: list[str]) -> str:
    kind = chance.random()
    if depth == 0 or kind < 0.35:
        return chance.choice(ATOMS)

    def inner() -> str:
        return random_source(chance, depth - 1, names)

    if kind < 0.6:
        return "".join(inner() for _ in range(chance.randint(1, 3)))
    if kind < 0.75:
        return f"(?:{'|'.join(inner() for _ in range(chance.randint(2, 3)))})"
    if kind < 0.92 or len(names) == 2:
        count = chance.choice(["*", "+", "?", "{1,2}", "{2}", "{0,2}", "{1,}"])
        return f"(?:{inner()}){count}{chance.choice(['', '?'])}"
    names.append(f"g{len(names)}")
    return f"(?P<{names[-1]}>{inner()})"


def matches(patterns: list[Pattern], pieces: list[str]) -> list[Match]:
    """All matches, one after another."""
    together, text, found = pattern_set(*patterns), "", list[Match]()
    search = Search(together)
    for piece in [*pieces, None]:
        text += piece or ""
        while True:
            match = search.read(text, 0)
            if match is None and piece is None:
                match = search.finish()
            if match is None:
                break
            found.append(match)
            search = Search(together, match.end)
    return found


def random_text(chance: random.Random) -> str:
    return "".join(
        chance.choice("abc |é") * chance.choice([1, 1, 2, 9]) for _ in range(chance.randint(0, 12))
    )


def test_a_match_is_that_of_re() -> None:
    chance, compared = random.Random(1), 0
    for _ in range(1200):
        source = random_source(chance, 3, [])
        try:
            one = pattern(source)
        except ValueError:
            continue
        text, compared = random_text(chance), compared + 1
        expected = re.search(source, text, re.DOTALL)
        for pieces in ([text], list(text)):
            first = next(iter(matches([one], pieces)), None)
            assert (first is None) == (expected is None), (source, text)
            if first is not None and expected is not None:
                assert (first.start, first.end) == expected.span(), (source, text)
                spans = {name: expected.span(name) for name in expected.groupdict()}
                assert first.groups == {k: span for k, span in spans.items() if span[0] >= 0}
    assert compared > 800


def test_pieces_make_no_difference() -> None:
    chance = random.Random(2)
    for _ in range(600):
        patterns = []
        for _ in range(chance.randint(1, 3)):
            try:
                patterns.append(
                    pattern(random_source(chance, 3, []), chance.choice([2, 4, 6, None]))
                )
            except ValueError:
                continue
        text = random_text(chance)
        whole = matches(patterns, [text])
        assert matches(patterns, list(text)) == whole
        assert matches(patterns, [text[at : at + 3] for at in range(0, len(text), 3)]) == whole


def test_the_first_then_the_longest_match_counts() -> None:
    found = matches([pattern("bc"), pattern("abcd?"), pattern("abc")], ["xabcd abc"])
    assert [(match.pattern, match.start, match.end) for match in found] == [(1, 1, 5), (1, 6, 9)]


def test_a_match_is_certain_before_its_end_is_known() -> None:
    search = Search(pattern_set(pattern(r"</t>\s*"), pattern("</tool>")))
    for text, certain in (("x</t", None), ("x</t>", 0), ("x</t>  ", 0)):
        assert search.read(text, 0) is None
        assert search.certain == certain
    assert search.pending == 1
    assert search.read("x</t>  y", 0) == Match(0, 1, 7, {})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("(?:a|aa)+b", "a"),
        (r"\s*\s*\s*\s*x", " "),
        ("(?:a[^b]{0,30}){3}b", "a"),
        ("(?P<key>[^>]+)>(?P<value>.*?)</", "é"),
        ("(?:(?:a+)+)+c", "ab"),
    ],
)
def test_a_pattern_reads_each_character_once(
    source: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that begin many matches and have none, on which backtracking would not end."""
    steps, step = 0, Pattern.step

    def counted(self: Pattern, state: tuple[int, ...], kind: int, fresh: bool) -> Any:
        nonlocal steps
        steps += 1
        return step(self, state, kind, fresh)

    monkeypatch.setattr(Pattern, "step", counted)
    text *= 3000
    for limit in (64, None):
        for pieces in ([text], [text[at : at + 7] for at in range(0, len(text), 7)]):
            steps = 0
            search = Search(pattern_set(pattern(source, limit)))
            position = 0
            for piece in pieces:
                assert search.read(piece, position) is None
                position += len(piece)
            assert 0 < steps <= len(text)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("(?=a)b", "groups"),
        ("(?<!a)b", "groups"),
        ("(?i)a", "groups"),
        ("(?P=a)b", "groups"),
        ("(?>a)b", "groups"),
        (r"a\b", "not read"),
        (r"(a)\1", "not read"),
        ("a$b", "alternative of its own"),
        ("^a", "at character 0"),
        ("a++", "after a repetition"),
        ("*a", "at character 0"),
        ("a{2,1}", "from more to less"),
        ("(a", "unbalanced"),
        ("a)", "unbalanced"),
        ("[a", "unbalanced"),
        ("[b-a]", "bad character range"),
        ("a*", "no text at all"),
        ("(?:a*)+b", "may be empty"),
        ("(?P<a>x)(?P<a>y)", "twice"),
        (f"a{{{MAX_NODES}}}", "too large"),
        ("(?:(?:(?:){9999}){9999}){9999}a", "too large"),
        ("(?:(?:(?:b{0}){9999}){9999}){9999}a", "too large"),
        ("(" * 30 + "a" + ")" * 30, "nested"),
        ("a" * 5000, "5000 characters"),
    ],
)
def test_what_is_not_read_is_refused(source: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        part = without_end(parse(source))
        assert part is not None
        Program(part)


def test_the_end_of_the_text_is_no_pattern() -> None:
    assert without_end(parse("$")) is None
    assert without_end(parse(r"a|$|\Z")) == parse("a")
