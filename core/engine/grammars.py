"""From `SamplingParams.structured_outputs` to what the scheduler hands to the worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import EngineConfig
from ..errors import InvalidRequest
from ..protocols import Vocabulary
from ..registry import Plugins
from ..structured.spec import grammar_spec
from ..structured.store import GrammarStore
from ..structured.thought import thought_is_open, thought_markers
from ..structured.vocabulary import make_vocabulary
from ..text.tokenizer import Tokenizer
from ..types import GrammarStart, SamplingParams


@dataclass(frozen=True)
class PreparedGrammar:
    """A request's compiled grammar, before its prompt is known."""

    grammar: Any
    token_bytes: list[bytes]
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    thought: tuple[bytes, bytes] | None
    begins_in_thought: bool

    def start(self, prompt: Sequence[int]) -> GrammarStart:
        """For one prompt."""
        in_thought = self.thought is not None and thought_is_open(
            prompt, self.thought, self.tokenizer, self.begins_in_thought
        )
        return GrammarStart(
            grammar=self.grammar,
            token_bytes=self.token_bytes,
            eos_token_ids=self.eos_token_ids,
            thought=self.thought,
            in_thought=in_thought,
        )


class Grammars:
    """Prepares grammars for requests. Nothing heavy happens before the first one."""

    def __init__(
        self,
        plugins: Plugins,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        self._config = config.structured_outputs_config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        eos = tuple(sorted(eos_token_ids))
        if not eos and tokenizer is not None and tokenizer.eos_token_id is not None:
            eos = (tokenizer.eos_token_id,)
        self._eos_token_ids = eos
        self._parser = (
            plugins["reasoning_parser"].load(config.reasoning_parser)
            if config.reasoning_parser is not None
            else None
        )
        self._vocabulary: Vocabulary | None = None
        self._store = GrammarStore(
            plugins["structured_backend"], self._config, self._make_vocabulary
        )

    async def prepare(
        self, params: SamplingParams, *, chat: bool, thinking: bool = True
    ) -> PreparedGrammar | None:
        """Compile what a request asks for; None when it asks for nothing.

        Raises InvalidRequest with the field's name.
        """
        asked = params.structured_outputs
        if asked is None:
            return None
        if self._tokenizer is None or not self._eos_token_ids:
            missing = "no tokenizer" if self._tokenizer is None else "no end token"
            raise InvalidRequest(
                f"structured_outputs: this engine has {missing}", param="structured_outputs"
            )
        grammar = await self._store.compile(grammar_spec(asked, self._config))
        assert self._vocabulary is not None
        wants_thought = chat if asked.after_reasoning is None else asked.after_reasoning
        markers = thought_markers(self._parser) if wants_thought else None
        return PreparedGrammar(
            grammar=grammar,
            token_bytes=self._vocabulary.token_bytes,
            eos_token_ids=self._eos_token_ids,
            tokenizer=self._tokenizer,
            thought=markers,
            begins_in_thought=thinking and getattr(self._parser, "begins_in_thought", True),
        )

    def close(self) -> None:
        """No more grammars."""
        self._store.close()

    def _make_vocabulary(self) -> Vocabulary:
        """On a thread of the store's pool."""
        assert self._tokenizer is not None
        self._vocabulary = make_vocabulary(
            self._tokenizer,
            self._vocab_size,
            self._eos_token_ids,
            compact_json=self._config.disable_any_whitespace,
        )
        return self._vocabulary
