"""`jackfield bench compare`: results of several engines side by side, and how many times better."""

from __future__ import annotations

import datetime
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..flags.parser import Parser
from .report import Record, say, table
from .workloads import WORKLOADS

SERVE_NUMBERS = (
    "requests_per_second", "output_tokens_per_second", "ttft_p50_ms", "ttft_p99_ms",
    "tpot_p50_ms", "itl_p50_ms", "itl_p99_ms",
)  # fmt: skip
"""Numbers of loads on a server, beside the workload's own."""
START_NUMBERS = ("ready_s", "first_token_s")
SITTING = datetime.timedelta(minutes=30)
"""Lines further apart were not measured in one sitting, and are not compared."""


def run(argv: list[str]) -> int:
    parser = Parser(
        prog="jackfield bench compare",
        description="Compare the engines in files of results, as `jackfield bench` writes them. "
        "Only lines of one device and one sitting (less than half an hour apart) are compared.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="RESULTS", help="JSON lines")
    parser.add_argument(
        "--base", help="engine that others are compared with (default: the first peer)"
    )
    parser.add_argument(
        "--numbers", nargs="+", metavar="NUMBER",
        help="as itl_p99_ms or 'ttft_*' (default: those that a workload is about)",
    )  # fmt: skip
    parser.add_argument("--models", nargs="+", help="only these")
    parser.add_argument("--workloads", nargs="+", help="only these")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    args = parser.parse_args(argv)
    try:
        records = [record for file in args.files for record in read(file)]
    except (OSError, ValueError) as error:
        parser.error(f"RESULTS: {error}")
    records = [
        record
        for record in records
        if (not args.models or record["model"] in args.models)
        and (not args.workloads or record["workload"] in args.workloads)
    ]
    count = 0
    for sitting in sittings(records):
        comparison = Comparison(sitting, args.base, args.numbers)
        if len(comparison.engines) < 2 or not comparison.rows:
            continue
        count += 1
        print(f"{sitting[0]['date'][:16].replace('T', ' ')}, {sitting[0]['device']}\n")
        print(comparison.markdown() if args.markdown else comparison.text(), end="\n\n")
    if not count:
        base = f", {args.base} among them" if args.base else ""
        say(f"no sitting has two engines{base} (of {len(records)} comparable lines)")
    return 0 if count else 1


def read(file: Path) -> Iterator[Record]:
    """Yield the comparable lines: an engine's measurement of a workload, complete.

    Raises ValueError for a line that is not a JSON object.
    """
    for number, text in enumerate(file.read_text().splitlines(), 1):
        try:
            line = msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
        names = {"date", "device", "engine", "model", "workload", "measured"}
        if names <= line.keys() and not line.get("partial"):
            yield line


def sittings(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield lists of records of one device whose dates follow one another within `SITTING`."""
    by_device: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: str(record["date"])):
        by_device.setdefault(record["device"], []).append(record)
    for lines in by_device.values():
        dates = [datetime.datetime.fromisoformat(line["date"]) for line in lines]
        starts = [n for n in range(len(lines)) if n == 0 or dates[n] - dates[n - 1] > SITTING]
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            yield lines[start:end]


class Comparison:
    """A row for each model, workload, load and number; a column for each engine.

    A later line of the same engine and load replaces an earlier one. `base` is an engine's name, or
    the first one that is not Jackfield.
    """

    def __init__(
        self,
        records: Sequence[Record],
        base: str | None = None,
        numbers: Sequence[str] | None = None,
    ) -> None:
        records = [record for record in records if "measured" in record]
        labels = engine_labels(records)
        self.engines = list(dict.fromkeys(labels))
        names = dict(zip(labels, (record["engine"] for record in records), strict=True))
        bases = [
            label
            for label, name in names.items()
            if (base in (name, label) if base else name != "jackfield")
        ]
        self.base = next(iter(bases or ([] if base else self.engines)), None)
        cells: dict[tuple[str, str], dict[str, float]] = {}
        for label, record in zip(labels, records, strict=True):
            at = ", ".join(f"{key}={value}" for key, value in record.get("at", {}).items())
            what = " ".join(filter(None, (record.get("model"), record["workload"], at)))
            for number in chosen_numbers(record, numbers):
                cells.setdefault((what, number), {})[label] = record["measured"][number]
        self.rows = [
            [*key, *map(values.get, self.engines), *self._times_better(key[1], values)]
            for key, values in cells.items()
            if self.base is not None and len(values) > 1
        ]

    @property
    def header(self) -> list[str]:
        own = [engine for engine in self.engines if engine != self.base]
        return ["what", "number", *self.engines, *(f"{name}: times better" for name in own)]

    def text(self) -> str:
        return table(self.rows, self.header)

    def markdown(self) -> str:
        """Return the table in Markdown, with values to four digits."""
        lines = [self.header, ["---"] * 2 + ["---:"] * (len(self.header) - 2)]
        for row in self.rows:
            lines.append([markdown_cell(value) for value in row])
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def _times_better(self, number: str, values: dict[str, float]) -> Iterator[float | None]:
        """Yield for each engine but the base how many times better it is: above 1 is better."""
        base = values.get(self.base or "")
        for engine in self.engines:
            if engine == self.base:
                continue
            value = values.get(engine)
            if not value or not base:
                yield None
            else:
                yield value / base if higher_is_better(number) else base / value


def markdown_cell(value: str | float | None) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:.4g}"


def engine_labels(records: Sequence[Record]) -> list[str]:
    """Return each record's label, or its engine, version and, where they differ, options."""
    options: dict[str, set[str]] = {}
    versions: dict[str, set[str]] = {}
    for record in records:
        versions.setdefault(record["engine"], set()).add(str(record.get("engine_version", "")))
        options.setdefault(record["engine"], set()).add(_options(record))
    labels = []
    for record in records:
        if "label" in record:
            labels.append(record["label"])
            continue
        name = record["engine"]
        parts = [name]
        if len(versions[name]) > 1 or name != "jackfield":
            parts.append(str(record.get("engine_version") or ""))
        if len(options[name]) > 1:
            parts.append(_options(record))
        labels.append(" ".join(filter(None, parts)))
    return labels


def _options(record: Record) -> str:
    """Return what a server was started with; in process, engines differ in options by nature."""
    options = record.get("options", [])
    return " ".join(options) if isinstance(options, list) else ""


def chosen_numbers(record: Record, patterns: Sequence[str] | None) -> list[str]:
    """Return the names of the numbers to compare, in the record's order."""
    workload = WORKLOADS.get(record["workload"])
    headline = () if workload is None else (workload.headline,)
    names = patterns or (*START_NUMBERS, *headline)
    if patterns is None and "ttft_p50_ms" in record["measured"]:
        names = (*SERVE_NUMBERS, *headline, "stream_itl_*", "burst_ttft_*")
    return [
        number
        for number, value in record["measured"].items()
        if isinstance(value, int | float) and any(fnmatch.fnmatch(number, name) for name in names)
    ]


def higher_is_better(number: str) -> bool:
    """Whether a number is a rate or a share, not a time."""
    return number.endswith(("_per_second", "_rate", "_share", "share_of_floor"))
