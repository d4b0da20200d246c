"""Options of speculative decoding: `EngineConfig.speculative_config`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ..errors import ConfigError
from .annotations import doc

FIELD = "speculative_config"
MOST_DRAFTS = 32


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which speculator proposes drafts, and how many. Names are vLLM's."""

    method: Annotated[str, doc("Speculator by name.", min_length=1)]
    num_speculative_tokens: Annotated[
        int, doc("Drafts of a request in a step.", ge=1, le=MOST_DRAFTS)
    ]
    options: Annotated[dict[str, Any], doc("The speculator's own.")] = {}

    @classmethod
    def read(cls, value: dict[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
        """Return the configuration. The speculator's own options stand beside the others, as vLLM
        writes them. Raises ConfigError."""
        given = value if isinstance(value, dict) else msgspec.structs.asdict(value)
        own = set(cls.__struct_fields__)
        fields = {name: given[name] for name in own & given.keys()}
        try:
            if others := {name: given[name] for name in given.keys() - own}:
                fields["options"] = {**fields.get("options", {}), **others}
            return msgspec.convert(fields, cls)
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigError(f"{FIELD}: {error} (got {given!r})", param=FIELD) from None
