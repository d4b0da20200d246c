"""What stands in a front end in the places of an engine's grammars and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import prometheus_client as prometheus

from ..config import StructuredOutputsConfig
from ..structured.spec import grammar_spec
from ..types import GrammarStart, SamplingParams
from .frames import GrammarWish


class GrammarWishes:
    """In the place of `Grammars`: the engine compiles; what is refused by its form is refused
    here."""

    def __init__(self, config: StructuredOutputsConfig) -> None:
        self._config = config

    async def prepare(
        self,
        params: SamplingParams,
        *,
        chat: bool,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> GrammarStart | None:
        """Its `grammar` is the GrammarWish to send. Raises InvalidRequest with the field's name."""
        if params.structured_outputs is None:
            return None
        grammar_spec(params.structured_outputs, self._config)
        wish = GrammarWish(chat, dict(template_arguments or {}))
        return GrammarStart(grammar=wish, eos_token_ids=(), token_bytes=None)


class FrontMetrics:
    """In the place of `EngineMetrics`, which counts where the engine is: what a front end counts
    itself. Plugins may add to its registry."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
