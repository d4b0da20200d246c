"""What is left to the night is there."""

from __future__ import annotations

import re

from nights import REPEATS, TESTS


def test_cases_that_are_left_to_the_night_are_of_tests_and_kits_that_exist() -> None:
    for path, names in REPEATS.items():
        text = (TESTS / path).read_text()
        for name in names:
            first = re.split(r"::|\[", name)[0]
            assert re.search(rf"^((async )?def|class) {first}\b|^{first} = ", text, re.M), name
