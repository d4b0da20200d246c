"""`Dialect`: what is registered for one parser of model output."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.registry import ParserMarks


class Dialect(NamedTuple):
    """A row of a table of parsers."""

    place: str
    """"module:class", in the table's package."""
    models: str
    """Who writes it."""
    marks: tuple[str, ...] = ()
    """What `auto` knows a model's chat template by."""
    model_types: tuple[str, ...] = ()
    """Model types that share those marks with no others; (): any."""
    other_marks: tuple[str, ...] = ()
    """What `auto` knows another chat template of such models by."""
    declaration: str = ""
    """Field of tokenizer_config.json in which a checkpoint declares what the parser reads."""
    aliases: tuple[str, ...] = ()
    """What SGLang calls it."""

    def register(self, registry: Any, name: str, package: str) -> None:
        """Add it to a registry."""
        registry.add(
            name, f"{package}.{self.place}", help=self.models, aliases=self.aliases,
            extra=ParserMarks(
                marks=self.marks, model_types=self.model_types, other_marks=self.other_marks,
                declaration=self.declaration,
            ),
        )  # fmt: skip
