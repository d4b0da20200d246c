"""`jackfield serve --explain`: what a command line becomes, line by line."""

from __future__ import annotations

import contextlib
import io
import os
import shlex

from ...core.errors import ConfigError, PluginError
from ...core.registry import load_plugins
from ..flags.config_file import with_config, without_config
from ..flags.engine_flags import engine_config, with_flags
from ..flags.foreign_options import Line, command_line, translated
from ..flags.parser import Parser
from ..flags.secrets import words_without_secrets
from ..flags.vllm_environment import environment_lines
from .serve_settings import make_parser


def explain(argv: list[str]) -> int:
    """Print a line for each variable and option, and the whole command line, without secrets;
    return the exit status, which is 2 if something is refused or unknown.
    """
    parser = make_parser()
    lines = [*environment_lines(os.environ), *translated(parser, argv)]
    try:
        lines += _file_lines(parser, argv)
    except ConfigError as error:
        lines.append(Line(("--config",), (), "refused", str(error)))
    lines = [_checked(parser, line) for line in lines]
    for line in lines:
        print(_text(line))
    words = without_config([word for word in command_line(parser, lines) if word != "--"])
    print(f"\n{shlex.join(['jackfield', 'serve', *words_without_secrets(words)])}")
    is_complete = all(line.state not in ("refused", "unknown") for line in lines)
    if is_complete and (problem := _problem(parser, words)):
        print(f"refused: {problem}")
        is_complete = False
    return 0 if is_complete else 2


def _file_lines(parser: Parser, argv: list[str]) -> list[Line]:
    args, _ = parser.parse_known_args(_without_refused(parser, argv))
    if args.config is None:
        return []
    num_words = len(argv)
    return translated(parser, with_config(parser, argv, args)[num_words:])


def _without_refused(parser: Parser, argv: list[str]) -> list[str]:
    """Return --config's words: others may be refused, which their own lines say."""
    lines = [line for line in translated(parser, argv) if line.flag == "--config"]
    return [word for line in lines for word in line.words]


def _checked(parser: Parser, line: Line) -> Line:
    """Return a line, with the state of words that the parser does not take."""
    if line.state == "unknown":
        return line._replace(note=parser.hint(line.flag))
    if line.state not in ("same", "equivalent") or not line.words:
        return line
    problem = _parse_error(parser, command_line(parser, [line]))
    return line._replace(words=(), state="refused", note=problem) if problem else line


def _parse_error(parser: Parser, words: list[str]) -> str:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            parser.parse_args(words)
    except SystemExit:
        return printed.getvalue().strip().removeprefix(f"{parser.prog}: error: ")
    return ""


def _problem(parser: Parser, words: list[str]) -> str:
    """Return what the configuration refuses of the whole command line."""
    if problem := _parse_error(parser, words):
        return problem
    args = parser.parse_args(words)
    try:
        config = engine_config(args, args.model_flag or args.model, fetch=False)
        load_plugins(disable=config.disable_plugins)
    except (ConfigError, PluginError) as error:
        return with_flags(str(error))
    return ""


def _text(line: Line) -> str:
    words = shlex.join(words_without_secrets(line.given))
    if line.state == "same":
        return f"{words}: the same"
    if line.state == "equivalent":
        return f"{words}: becomes {shlex.join(words_without_secrets(line.words)) or 'nothing'}"
    if line.state == "unknown":
        return f"{words}: unknown; {line.note}"
    return f"{words}: {'has no effect' if line.state == 'no effect' else 'refused'}: {line.note}"
