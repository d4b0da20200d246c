"""`MistralFormat`: the configuration, the tokenizer and the chats of Mistral's own checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ....core.errors import LoadError
from ....core.text.tokenizer import Tokenizer
from .params import config_of
from .tekken import FILE, ROLES, backend, read_tekken, special_tokens

THINK = ("[THINK]", "[/THINK]")
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


class MistralFormat:
    config_file: ClassVar[str] = "params.json"
    tokenizer_file: ClassVar[str] = FILE
    load_format: ClassVar[str] = "mistral"

    @staticmethod
    def read_config(folder: Path) -> dict[str, Any]:
        return config_of(folder)

    @staticmethod
    def read_chat_templates(folder: Path) -> Mapping[str, str]:
        """Return the one template of all versions, after this tekken.json's settings."""
        content = read_tekken(folder)
        version = content["config"]["version"].removeprefix("v")
        think = list(THINK) if set(THINK) <= set(special_tokens(content)) else []
        head = (
            f"{{%- set version = {version} -%}}\n{{%- set think = {think} -%}}\n"
            f"{_settings(content)}\n"
        )
        return {"default": head + TEMPLATE.read_text(encoding="utf-8")}

    @staticmethod
    def read_tokenizer(folder: Path, chat_templates: Mapping[str, str]) -> Tokenizer:
        content = read_tekken(folder)
        special = set(special_tokens(content))
        tokens = {role: token for role, token in ROLES.items() if token in special}
        return Tokenizer(
            backend(content),
            bos_token=tokens.get("bos_token"),
            eos_token=tokens.get("eos_token"),
            chat_templates=chat_templates,
            special_tokens=tokens,
        )


def _settings(content: Mapping[str, Any]) -> str:
    """Return the template's `settings`: since v15, the reasoning efforts that tekken.json allows.
    Raises LoadError for anything else.
    """
    builder = content.get("model_settings_builder") or {}
    effort = builder.get("reasoning_effort") if isinstance(builder, dict) else None
    if effort is None:
        return "{%- set settings = none -%}"
    match effort:
        case {"values": [*values], "default": str(default)} if default in values:
            allowed = json.dumps(values)
        case _:
            raise LoadError(
                f"tokenizer: {FILE}: model_settings_builder.reasoning_effort must have values, and "
                f"a default among them, got {str(effort)[:80]}"
            )
    return (
        f"{{%- set effort = reasoning_effort | default({json.dumps(default)}, true) -%}}\n"
        f"{{%- if effort not in {allowed} -%}}\n"
        "    {{- raise_exception('reasoning_effort: this model has ' "
        f"~ {allowed} | join(', ')) -}}}}\n"
        "{%- endif -%}\n"
        "{%- set settings = {'reasoning_effort': effort} -%}"
    )
