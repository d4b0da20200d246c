"""`jackfield lora`: look at an adapter before it is served."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from ...core.errors import JackfieldError
from ...core.registry import load_plugins
from ..flags.engine_flags import add_no_plugin, fail
from ..flags.parser import Parser
from ..inventory import output_aside

if TYPE_CHECKING:
    from ..adapter_report import AdapterReport, Change


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jackfield lora",
        description="Say what an adapter (LoRA) has, layer by layer: ranks, scales, sizes; what of "
        "it has no effect; and whether it can be served, or the field or tensor for which not. "
        "With --model its layers are compared with those of a checkpoint, whose weights are not "
        "loaded.",
    )
    parser.add_argument("action", choices=("inspect",), help="inspect: read it and say what it has")
    parser.add_argument("path", metavar="PATH", help="the adapter's folder, or its GGUF file")
    parser.add_argument("--model", default="", metavar="FOLDER", help="checkpoint to compare with")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_no_plugin(parser)
    return parser


def run(argv: list[str]) -> int:
    """Return the exit status: 0 if it can be served, 1 if not, 2 for a model that cannot be
    read."""
    args = make_parser().parse_args(argv)
    from ..adapter_report import adapter_report

    try:
        with output_aside():
            plugins = load_plugins(disable=args.no_plugin)
            report = adapter_report(plugins, args.path, args.model)
    except JackfieldError as error:
        return fail(error)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print(_as_text(report))
    return 0 if report.servable else 1


def _as_text(report: AdapterReport) -> str:
    lines = [report.path]
    facts = {
        "format": report.format,
        "base model": report.base_model,
        "digest": report.digest,
        "rank": str(report.rank or ""),
        "size": report.changes and f"{_size(report.nbytes)}, {_size(report.nbytes_16_bit)} in "
        "16 bits",
        "steps": report.changes and (
            "recorded" if report.plain else "launched: not low-rank changes of linear layers alone"
        ),
        "acts from": ", ".join(map(str, report.invocation_tokens)),
    }  # fmt: skip
    lines += [f"  {name:10}  {text}" for name, text in facts.items() if text]
    if report.changes:
        lines += ["", *_table(report.changes)]
    lines += ["", *(f"note: {note}" for note in report.notes)] if report.notes else []
    to = f" to {report.model}" if report.model else ""
    verdict = f"can be applied{to}" if to else "can be read; with --model it is compared with one"
    refused = f"cannot be served{to and f' with {report.model}'}: {report.reason}"
    return "\n".join([*lines, "", verdict if report.servable else refused])


def _table(changes: list[Change]) -> list[str]:
    rows = [("layers", "kind", "count", "rank", "scale", "size", "type", "bytes")]
    rows += [
        (
            each.layers, each.kind, str(each.count), _range(each.ranks),
            _range([round(scale, 6) for scale in each.scales]), " | ".join(each.shapes[:3]),
            ", ".join(each.dtypes), _size(each.nbytes),
        )
        for each in changes
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _range(values: list[int] | list[float]) -> str:
    if len(values) <= 3:
        return ", ".join(f"{value:g}" for value in values)
    return f"{values[0]:g} to {values[-1]:g}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes} B"
