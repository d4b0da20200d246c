"""Names of models on the Hugging Face hub as people paste them: with a scheme, as a page's address,
with a revision."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError, shown

HUB_HOSTS = tuple(f"{name}.co" for name in ("huggingface", "www.huggingface", "hf"))
PART = r"[A-Za-z0-9][\w.-]*"
NAME = re.compile(rf"(?P<repo>{PART}/{PART})(?:@(?P<revision>[\w./-]+)|:(?P<variant>[\w.-]+))?")
PAGE = re.compile(rf"(?P<repo>{PART}/{PART})(?:/tree/(?P<revision>[^/]+))?/?")
FORMS = (
    "a folder here, or a name on the Hugging Face hub: owner/name, owner/name@revision, "
    "hf://owner/name, or its page's address"
)
"""What a model may be, for errors."""


class HubName(NamedTuple):
    """A repository on the hub."""

    repo: str
    """owner/name."""
    revision: str | None


def local_or_hub_name(text: str, option: str) -> str | HubName:
    """Return a path as it is, and the hub's names apart.

    option: which one has this value, for errors. Raises ConfigError for addresses that are not the
    hub's, and for names of single files.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        match = NAME.fullmatch(text)
        if match is None or match[0] == match["repo"] or Path(text).exists():
            return text
        return _hub_name(match, text, option)
    if scheme == "file":
        return rest
    if scheme == "hf":
        match = NAME.fullmatch(rest)
    else:
        host, _, page = rest.split("?")[0].split("#")[0].partition("/")
        on_hub = scheme in ("http", "https") and host.lower() in HUB_HOSTS
        match = PAGE.fullmatch(page) if on_hub else None
    if match is None:
        raise ConfigError(
            f"{option}: {shown(text)} cannot be read from there; it must be {FORMS}. Copy it into "
            "a folder, and name that",
            param=option,
        )
    return _hub_name(match, text, option)


def _hub_name(match: re.Match[str], text: str, option: str) -> HubName:
    parts = match.groupdict()
    if parts.get("variant"):
        raise ConfigError(
            f"{option}: {shown(text)} names one file of a repository, which is not fetched alone: "
            f"put the *.gguf of {parts['variant']} into a folder with config.json and the "
            "tokenizer's files, name that folder, and set load_format to gguf",
            param=option,
        )
    return HubName(parts["repo"], parts["revision"])
