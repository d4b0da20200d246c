"""Leaves keys, tokens and passwords out of options that are shown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "(hidden)"
SECRET = re.compile(
    r"(^|[-_.])((api|access|secret|private|account|encryption)[-_]?keys?"
    r"|(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!cls_)(?<!sep_)(?<!mask_)token|secret|password"
    r"|passphrase|credentials?|authorization|auth|headers?)$",
    re.IGNORECASE,
)
"""Names of options, and keys within them, whose values are not shown."""
IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")
"""Name and password in an address."""
_ASSIGNMENT = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)


def without_secrets(value: Any, name: str = "") -> Any:
    """Return an option's value with HIDDEN for the secrets in it."""
    if value and SECRET.search(name):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return IN_ADDRESS.sub(f"{HIDDEN}@", value) if isinstance(value, str) else value


def words_without_secrets(words: Iterable[str]) -> list[str]:
    """Return the words of a command line, or NAME=VALUE of an environment, as they may be shown."""
    shown, name = [], ""
    for word in words:
        if word.startswith("-") and not word.lstrip("-")[:1].isdigit():
            name, equals, value = word.partition("=")
            shown.append(f"{name}={_shown(name, value)}" if equals else name)
        else:
            shown.append(_shown(name, word))
    return shown


def _shown(name: str, text: str) -> str:
    if not SECRET.search(name):
        if match := _ASSIGNMENT.fullmatch(text):  # An environment variable, or a plugin's option.
            return f"{match[1]}={_shown(match[1], match[2])}"
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict | list):
            changed = without_secrets(value)
            return text if changed == value else json.dumps(changed)
    return str(without_secrets(text, name))
