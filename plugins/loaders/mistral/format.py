"""`MistralFormat`: the configuration, the tokenizer and the chats of Mistral's own checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ....core.text.tokenizer import Tokenizer
from .params import config_of
from .tekken import FILE, ROLES, backend, read_tekken, special_tokens

THINK = ("[THINK]", "[/THINK]")
"""Around reasoning, since v13."""
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


class MistralFormat:
    """params.json and tekken.json; the weights are `MistralLoader`'s."""

    config_file: ClassVar[str] = "params.json"
    tokenizer_file: ClassVar[str] = FILE
    load_format: ClassVar[str] = "mistral"

    @staticmethod
    def read_config(folder: Path) -> dict[str, Any]:
        return config_of(folder)

    @staticmethod
    def read_chat_templates(folder: Path) -> Mapping[str, str]:
        """Return the one template of all versions, with what this tekken.json says before it."""
        content = read_tekken(folder)
        version = content["config"]["version"].removeprefix("v")
        think = list(THINK) if set(THINK) <= set(special_tokens(content)) else []
        head = f"{{%- set version = {version} -%}}\n{{%- set think = {think} -%}}\n"
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
