"""Parses flags' values; errors name the flag."""

from __future__ import annotations

import argparse
import decimal
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

SUFFIXES = {
    letter: base**power
    for letters, base in (("kmgt", 1000), ("KMGT", 1024))
    for power, letter in enumerate(letters, 1)
}
"""Suffix of a number → factor."""


def whole_number(text: str, least: float | None = None, most: float | None = None) -> int:
    """Return an integer within bounds. Raises ArgumentTypeError."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if least is not None and value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    if most is not None and value > most:
        raise argparse.ArgumentTypeError(f"must be at most {most}, got {value}")
    return value


def scaled_number(text: str) -> int:
    """Return an integer, with one of SUFFIXES: 2k is 2,000, 1.5k is 1,500, and 32K is 32,768.
    Raises ArgumentTypeError.
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([kmgtKMGT])", text.strip())
    if match is None:
        return whole_number(text)
    value = decimal.Decimal(match[1]) * SUFFIXES[match[2]]
    if value != int(value):
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(value)


def number_or(words: Sequence[str]) -> Callable[[str], int | str]:
    """Return a parser of these words, or a scaled number."""

    def read(text: str) -> int | str:
        if text in words:
            return text
        try:
            return scaled_number(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, or {' or '.join(words)}") from None

    return read


def positive_int(text: str) -> int:
    return whole_number(text, 1)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")
    return value


def non_empty(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}: {text!r}") from None


class Words(argparse.Action):
    """Accepts several words, or one JSON list, as vLLM writes them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        words = list(values or ())
        if len(words) == 1 and words[0].lstrip().startswith("["):
            try:
                words = json.loads(words[0])
            except ValueError as error:
                parser.error(f"argument {option_string}: no JSON list: {error}")
            if not all(isinstance(word, str) for word in words):
                parser.error(f"argument {option_string}: a list of texts is needed")
        setattr(namespace, self.dest, tuple(words))
