"""`Dialect`: what is registered for a parser."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.registry import ParserMarks


class Dialect(NamedTuple):
    """A row of a table of parsers."""

    place: str
    """"module:class", in the table's package."""
    models: str
    """Whose models write it."""
    marks: tuple[str, ...] = ()
    """Texts in a chat template by which `auto` recognises a model."""
    model_types: tuple[str, ...] = ()
    """Model types that alone have those marks; (): any."""
    other_marks: tuple[str, ...] = ()
    """Texts by which `auto` recognises other chat templates of these models."""
    declaration: str = ""
    """Field of tokenizer_config.json that declares the parser's format."""
    aliases: tuple[str, ...] = ()
    """SGLang's names."""

    def register(self, registry: Any, name: str, package: str) -> None:
        registry.add(
            name, f"{package}.{self.place}", help=self.models, aliases=self.aliases,
            extra=ParserMarks(
                marks=self.marks, model_types=self.model_types, other_marks=self.other_marks,
                declaration=self.declaration,
            ),
        )  # fmt: skip
