"""Reads what stands beside tokenizer.json: settings, special tokens and chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ..errors import ConfigError, LoadError, shown
from ..registration.checkpoint_formats import AUTO, tokenizer_format
from ..registration.registered import Registry

_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def read_json(file: Path) -> dict[str, Any]:
    """Return the object of a JSON file; {} if there is no file, or no object in it. Raises
    LoadError."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise LoadError(f"tokenizer: {file} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def token_strings(*files: dict[str, Any]) -> dict[str, str]:
    """Read bos_token, eos_token …, each a string or {"content": …}; earlier files take
    precedence."""
    tokens: dict[str, str] = {}
    for file in files:
        for key, value in file.items():
            if isinstance(value, dict):
                value = value.get("content")
            if key.endswith("_token") and isinstance(value, str):
                tokens.setdefault(key, value)
    return tokens


def template_texts(
    folder: Path, given: str | None, formats: Registry[Any] | None = None, mode: str = AUTO
) -> str:
    """Return the chat templates of a checkpoint's folder, one after the other, or the one that is
    given instead, as text or as a path. `formats`, `mode`: as `Tokenizer.load`. Raises LoadError;
    ConfigError about the one given."""
    if given is not None:
        return template_text(given)
    if formats is not None and (name := tokenizer_format(formats, mode, folder)) is not None:
        return "\n".join(format_templates(formats, name, folder, None).values())
    return "\n".join(chat_templates(folder, read_json(folder / "tokenizer_config.json")).values())


def format_templates(
    formats: Registry[Any], name: str, folder: Path, given: str | None
) -> Mapping[str, str]:
    """Return the chat templates of a checkpoint whose tokenizer a checkpoint format reads: the one
    that is given, else those of the usual files, else the format's. Raises LoadError; ConfigError
    about the one given."""
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
    """Return the chat templates of a checkpoint: name → Jinja text.

    config: of tokenizer_config.json; files of their own take precedence. Raises LoadError.
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
    """Return the template that an option gives, as text or as a path. Raises ConfigError."""
    if "{" in template or "\n" in template:
        return template
    file = Path(template)
    if not file.is_file():
        raise ConfigError(
            f"chat_template: {template!r} is no file, and no Jinja text", param="chat_template"
        )
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template: {template!r} cannot be read: {error}", param="chat_template"
        ) from error


def add_from_config(backend: Backend, config: dict[str, Any], tokens: dict[str, str]) -> None:
    """Add tokens that tokenizer_config.json declares special and tokenizer.json does not."""
    existing = backend.get_added_tokens_decoder()
    special = [AddedToken(t, special=True, normalized=False) for t in tokens.values()]
    for id, token in _declared(config.get("added_tokens_decoder")):
        if id not in existing and backend.token_to_id(token.content) in (None, id):
            backend.add_tokens([token])
    contents = {t.content for t in existing.values()}
    missing = [t for t in special if t.content not in contents and backend.token_to_id(t.content)]
    if missing:
        backend.add_special_tokens(missing)


def _declared(declared: Any) -> Iterator[tuple[int, AddedToken]]:
    """Yield the entries of `added_tokens_decoder` that are tokens with an id."""
    for id, entry in (declared if isinstance(declared, dict) else {}).items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not id.isdecimal() or not isinstance(content, str):
            continue
        flags = {name: bool(entry[name]) for name in _FLAGS if name in entry}
        yield int(id), AddedToken(content, **flags)
