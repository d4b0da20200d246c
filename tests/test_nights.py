"""What is left to the night is there, and what of it is chosen by rule is chosen so."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nights
import pytest
from nights import EACH_VALUE, REPEATS, STRESS, TESTS, TOGETHER


@pytest.mark.parametrize("listed", [REPEATS, TOGETHER, STRESS, EACH_VALUE])
def test_what_is_left_to_the_night_is_of_tests_and_kits_that_exist(
    listed: dict[str, tuple[str, ...]],
) -> None:
    for path, names in listed.items():
        text = (TESTS / path).read_text()
        for name in names:
            first = re.split(r"::|\[", name)[0]
            end = r"\w*" if listed is EACH_VALUE else ""
            found = rf"^((async )?def|class) {first}{end}\b|^{first} = "
            assert re.search(found, text, re.M), name


class Case(SimpleNamespace):
    """An item, as far as it is asked for its name, parameters and marks."""

    def __init__(self, file: str, name: str, **params: Any) -> None:
        nodeid = f"tests/{file}::{name}[{'-'.join(map(str, params.values()))}]"
        super().__init__(path=Path(TESTS / file), nodeid=nodeid, slow=False)
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> bool | None:
        return self.slow or None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        assert mark.name == "slow"
        self.slow = True

    __hash__ = object.__hash__


def test_each_value_runs_by_day_in_few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    file = "test_nights.py"
    monkeypatch.setattr(nights, "EACH_VALUE", {file: ("test_some",)})
    grid = list(itertools.product("abc", (1, 2), (None, True)))
    cases: list[Any] = [Case(file, "test_some", x=x, y=y, z=z) for x, y, z in grid]
    cases[0].slow = True  # It was left to the night before.
    others: list[Any] = [Case(file, "test_other", x=x) for x in (1, 1)]
    nights.mark_combinations([*cases, *others])
    day = [case.callspec.params for case in cases if not case.slow]
    assert len(day) == 3 and not any(case.slow for case in others)
    for name, values in (("x", {*"abc"}), ("y", {1, 2}), ("z", {None, True})):
        assert {params[name] for params in day} == values
