"""The parser of every command: one-line errors, and help by group or word."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ...core.spelling import nearest
from .foreign_options import Option, command_line, translated

KINDS = {"refused": "", "no effect": "has no effect: ", "equivalent": "becomes "}
"""State of another server's option → what comes before its text."""
MANY = 60
"""Options beyond which `--help` explains some and lists the groups."""


class HelpFormatter(argparse.HelpFormatter):
    """Shows a flag's value once, and a short usage line."""

    names_of: Callable[[str], Iterable[str]] | None = None
    """Namespace attribute → registered names for its flag."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        names = () if self.names_of is None else sorted(self.names_of(action.dest))
        return f"{text} Names: {', '.join(names)}." if names else text

    def _format_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None
    ) -> str:
        if usage is not None:
            return super()._format_usage(usage, actions, groups, prefix)
        words, has_options = [self._prog], False
        for action in actions:
            if action.option_strings and action.required:
                words.append(self._format_action_invocation(action).rpartition(", ")[2])
            elif not action.option_strings:
                metavar = self._get_default_metavar_for_positional(action)
                words.append(self._format_args(action, metavar))
            has_options = has_options or bool(action.option_strings and not action.required)
        words += ["[options]"] * has_options
        return f"{'usage: ' if prefix is None else prefix}{' '.join(words)}\n\n"


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, with the flag that was meant.

    Flags are written with - or _, and never abbreviated. `--help=WORD` shows a group of flags, or
    the flags that contain the word; `--help=all` shows everything.
    """

    common: Sequence[str] = ()
    """Flags that a short `--help` explains; empty: those without a group."""
    other_options: Mapping[str, Option] = {}
    """Other servers' flags → what becomes of them."""
    other_groups: Mapping[str, str] = {}
    """Other group names for `--help=`, in lower case → titles."""
    names_of: Callable[[str], Iterable[str]] | None = None
    """Namespace attribute → registered names for its flag."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options = {"formatter_class": HelpFormatter, **options}
        # argparse would exit by itself, with all names of a flag in the error.
        super().__init__(*args, **{**options, "allow_abbrev": False, "exit_on_error": False})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, with hints for unknown flags."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._explain(unknown))
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        lines = translated(self, sys.argv[1:] if args is None else args)
        words = command_line(self, lines)
        topic = next((word for word in words if word.startswith("--help=")), None)
        if topic is not None and self._subparsers is None:
            self._show_topic(topic.removeprefix("--help="))
        for line in lines:
            if line.state == "refused":
                self.error(f"{line.flag}: {line.note}")
        try:
            return super().parse_known_args(words, namespace)
        except argparse.ArgumentError as error:
            names = (error.argument_name or "").split("/")
            long = (name for name in names if name.startswith("--"))
            error.argument_name = next(long, names[0]) or None
            self.error(str(error))

    def error(self, message: str) -> NoReturn:
        """Print the error without usage, and exit."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _get_formatter(self) -> argparse.HelpFormatter:
        formatter = super()._get_formatter()
        if isinstance(formatter, HelpFormatter):
            formatter.names_of = self.names_of
        return formatter

    def _explain(self, unknown: list[str]) -> str:
        return f"unrecognized argument: {unknown[0]}; {self.hint(unknown[0].split('=')[0])}"

    def hint(self, flag: str) -> str:
        """Return the flag that an unknown one resembles, or where flags are listed."""
        near = nearest(flag, self._long_flags()) if flag.startswith("--") else None
        return f"did you mean {near}?" if near else f"`{self.prog} --help` lists the options"

    def _long_flags(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]

    # ---------------------------------------------------------------- help

    def format_help(self) -> str:
        """Return the help text, or one page if it is longer."""
        return self._format_short() if len(self._actions) > MANY else super().format_help()

    def _format_short(self) -> str:
        formatter = super()._get_formatter()  # Without names, which are many.
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.start_section("the first options to know")
        formatter.add_arguments(self._get_positional_actions())
        formatter.add_arguments(self._first_options())
        formatter.end_section()
        return formatter.format_help() + "\n" + self._listed_groups() + self._more_help()

    def _first_options(self) -> list[argparse.Action]:
        if self.common:
            return [self._option_string_actions[flag] for flag in self.common]
        return [action for action in _shown(self._optionals) if action.dest != "help"]

    def _listed_groups(self) -> str:
        formatter = super()._get_formatter()
        formatter.start_section("groups of options")
        for group in self._titled_groups():
            # Laid out as options are: the title, then the text in a column.
            text = (group.description or "").replace("%", "%%")
            formatter.add_argument(argparse.Action([], dest="", metavar=group.title, help=text))
        formatter.end_section()
        return formatter.format_help()

    def _more_help(self) -> str:
        examples = {
            f"--help={self._first_options()[0].option_strings[-1].lstrip('-')}": "one option",
            f"--help={self._titled_groups()[0].title}": "a group, or options with this word",
            "--help=all": "every option",
        }
        lines = [f"  {self.prog} {what:20} {meaning}" for what, meaning in examples.items()]
        return "\n".join(["", "more help:", *lines, ""])

    def _titled_groups(self) -> list[argparse._ArgumentGroup]:
        own = (self._positionals, self._optionals)
        return [group for group in self._action_groups if group not in own and _shown(group)]

    def _show_topic(self, topic: str) -> NoReturn:
        word = topic.strip().lower().replace("_", "-")
        if word in ("all", "page", ""):
            text = super().format_help()
        elif word == "listgroup":
            text = self._listed_groups()
        else:
            text = self._about(word)
        print(text, end="")
        self.exit()

    def _about(self, word: str) -> str:
        """Return the help for a group, a flag, or flags that contain a word."""
        flag = f"--{word.lstrip('-')}"
        for name in (word, flag):
            other = self.other_options.get(name)
            if other is not None and name not in self._option_string_actions:
                return f"{name}: {KINDS[other.state]}{other.text}\n"
        if not word.startswith("-") and (group := self._group_named(word)) is not None:
            return self._sections({group: _shown(group)})
        action = self._option_string_actions.get(word) or self._option_string_actions.get(flag)
        prefix = word.lstrip("-")
        sections = {}
        for group in self._action_groups:
            matches = [
                each
                for each in _shown(group)
                if (each is action if action else any(prefix in n for n in each.option_strings))
            ]
            if matches:
                sections[group] = matches
        if not sections:
            near = nearest(flag, self._long_flags())
            hint = f"; did you mean {near}?" if near else "; --help=listgroup lists the groups"
            self.error(f"--help: no option and no group is called {word}{hint}")
        return self._sections(sections)

    def _group_named(self, word: str) -> argparse._ArgumentGroup | None:
        def plain(title: str) -> str:
            return re.sub(r"[-_ ]|(config|options)$", "", title.lower())

        group_name = plain(word)
        group_name = plain(self.other_groups.get(group_name, group_name))
        groups = (group for group in self._titled_groups() if plain(str(group.title)) == group_name)
        return next(groups, None)

    def _sections(
        self, sections: Mapping[argparse._ArgumentGroup, Sequence[argparse.Action]]
    ) -> str:
        formatter = self._get_formatter()
        for group, actions in sections.items():
            formatter.start_section(group.title)
            if list(actions) == _shown(group):
                formatter.add_text(group.description)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()


def _shown(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    return [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
