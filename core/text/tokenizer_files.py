"""Reads settings, special tokens and chat templates beside tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ..errors import ConfigError, LoadError, shown
from ..local_path import is_file
from ..registration.checkpoint_formats import AUTO, tokenizer_format
from ..registration.registered import Registry

NAMED = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
"""Named special tokens, in the order of new ids."""
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON file's object, or {}. Raises LoadError."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise LoadError(f"tokenizer: {file} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def template_texts(
    folder: Path, given: str | None, formats: Registry[Any] | None = None, mode: str = AUTO
) -> str:
    """Return a folder's chat templates joined, or the given one (text or path). `formats`, `mode`:
    as `Tokenizer.load`. Raises LoadError; ConfigError about the given one.
    """
    if given is not None:
        return template_text(given)
    if formats is not None and (name := tokenizer_format(formats, mode, folder)) is not None:
        return "\n".join(format_templates(formats, name, folder, None).values())
    return "\n".join(chat_templates(folder, read_json(folder / "tokenizer_config.json")).values())


def format_templates(
    formats: Registry[Any], name: str, folder: Path, given: str | None
) -> Mapping[str, str]:
    """Return the chat templates for a checkpoint format's tokenizer: the given one, the usual
    files', or the format's. Raises LoadError; ConfigError about the given one.
    """
    if given is not None:
        return {"default": template_text(given)}
    if own := chat_templates(folder, read_json(folder / "tokenizer_config.json")):
        return own
    with formats.calling(name, "read_chat_templates"):
        templates: Mapping[str, str] = formats.load(name).read_chat_templates(folder)
        if not isinstance(templates, Mapping) or not all(
            isinstance(text, str) for item in templates.items() for text in item
        ):
            raise TypeError(f"it returned {shown(templates)}, which is no mapping of texts")
    return templates


def chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return a checkpoint's chat templates: name → Jinja text.

    config: tokenizer_config.json; separate files take precedence. Raises LoadError.
    """
    templates: dict[str, str] = {}
    own = folder / "chat_template.json"
    for file, content in ((folder / "tokenizer_config.json", config), (own, read_json(own))):
        template = content.get("chat_template")
        if isinstance(template, str):
            templates["default"] = template
        elif isinstance(template, list):
            templates.update(_named(template, file))
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates["default"] = _read_template(file)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_template(file)
    return templates


def _named(entries: list[Any], file: Path) -> Iterator[tuple[str, str]]:
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(template)}:
                yield name, template
            case _:
                raise LoadError(
                    f"tokenizer: {file}: chat_template must be a text, or a list of objects with "
                    f"`name` and `template`, got {str(entry)[:80]!r} in it"
                )


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"tokenizer: {file} cannot be read: {error}") from error


def template_text(template: str) -> str:
    """Return an option's template, as text or from a path. Raises ConfigError."""
    if "{" in template or "\n" in template:
        return template
    file = Path(template)
    if not is_file(file):
        raise ConfigError(
            f"chat_template: {template!r} is no file, and no Jinja text", param="chat_template"
        )
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template: {template!r} cannot be read: {error}", param="chat_template"
        ) from error


class DeclaredTokens(NamedTuple):
    """Tokens declared beside tokenizer.json."""

    added: list[AddedToken]
    """By declared id, only for the order of new ones."""
    named: dict[str, AddedToken]
    extra: list[AddedToken]
    """Unnamed special tokens."""

    @classmethod
    def read(cls, folder: Path, config: dict[str, Any]) -> DeclaredTokens:
        """Read what `transformers` reads: tokenizer_config.json, or without `added_tokens_decoder`,
        special_tokens_map.json, which takes precedence, and added_tokens.json. Raises LoadError.
        """
        settings = dict(config)
        settings["extra_special_tokens"] = _extra(config)
        others = read_json(folder / "special_tokens_map.json")
        legacy = "added_tokens_decoder" not in config
        for key, value in others.items() if legacy else ():
            joined = key == "extra_special_tokens" and isinstance(value, list)
            settings[key] = [*_listed(settings[key]), *value] if joined else value
        settings["extra_special_tokens"] = settings["extra_special_tokens"] or _extra(settings)
        extra, named = settings["extra_special_tokens"], {}
        own = extra if isinstance(extra, dict) else {}
        roles = [*NAMED, *(key for key in settings if key.endswith("_token") and key not in NAMED)]
        for role, value in ((role, settings.get(role)) for role in roles):
            if (token := _token(value)) is not None:
                named[role] = token
        named |= {role: token for role, value in own.items() if (token := _token(value))}
        extras = [token for value in _listed(extra) if (token := _token(value)) is not None]
        if legacy:
            special = {token.content for token in [*named.values(), *extras]}
            added = dict(_legacy_tokens(read_json(folder / "added_tokens.json"), special))
        else:
            added = dict(_declared(config["added_tokens_decoder"]))
            for role, value in others.items():  # Not read there: for a template's sake.
                if role.endswith("_token") and role not in named and (token := _token(value)):
                    named[role] = token
        by_content = {token.content: token for token in added.values()}
        named = {role: by_content.get(token.content, token) for role, token in named.items()}
        return cls([added[id] for id in sorted(added)], named, extras)

    @property
    def strings(self) -> dict[str, str]:
        return {role: token.content for role, token in self.named.items()}

    def add_to(self, backend: Backend) -> None:
        """Add those that tokenizer.json lacks, or has differently."""
        existing = backend.get_added_tokens_decoder().values()
        same = {repr(token) for token in existing}
        tokens = [token for token in self.added if repr(token) not in same]
        contents = {token.content for token in [*existing, *tokens]}
        for token in [*self.named.values(), *self.extra]:
            if token.content not in contents:
                contents.add(token.content)
                tokens.append(token)
        names = set(self.strings.values())
        for token in tokens:
            token.special = token.special or token.content in names
        if tokens:
            backend.add_tokens(tokens)


def _extra(settings: Mapping[str, Any]) -> Any:
    return settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _token(value: Any) -> AddedToken | None:
    """Return an entry's special token (a text or {"content": …}), or None."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return None
    flags = {name: bool(value[name]) for name in _FLAGS if name in value}
    return AddedToken(value["content"], **{**flags, "special": True})


def _legacy_tokens(
    entries: dict[str, Any], special: Collection[str]
) -> Iterator[tuple[int, AddedToken]]:
    """Yield added_tokens.json's tokens with ids."""
    for content, id in entries.items():
        if type(id) is int:
            is_special = content in special
            yield id, AddedToken(content, special=is_special, normalized=not is_special)


def _declared(declared: Any) -> Iterator[tuple[int, AddedToken]]:
    """Yield `added_tokens_decoder`'s tokens with ids."""
    for id, entry in (declared if isinstance(declared, dict) else {}).items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not id.isdecimal() or not isinstance(content, str):
            continue
        flags = {name: bool(entry[name]) for name in _FLAGS if name in entry}
        yield int(id), AddedToken(content, **flags)
