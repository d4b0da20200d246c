"""Turns `SamplingParams.structured_outputs` into grammars for the scheduler and the worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..config import EngineConfig
from ..errors import InvalidRequest
from ..grammars.reasoning_gate import gate_parser, make_reasoning_gate
from ..grammars.spec import begins_free, field_of, grammar_spec
from ..grammars.store import GrammarStore
from ..grammars.vocabulary import make_vocabulary
from ..protocols.grammars import Grammar, GrammarSpec, Vocabulary
from ..registry import Plugins
from ..sampling_params import SamplingParams, StructuredOutputsParams
from ..step import CompiledGrammar, GrammarStart
from ..text.tokenizer import Tokenizer


class Grammars:
    """Prepares requests' grammars, lazily."""

    def __init__(
        self,
        plugins: Plugins,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        prompt_end: Callable[[Mapping[str, Any] | None], str] = lambda _: "",
    ) -> None:
        """prompt_end: chat template arguments → the rendered prompt's end."""
        self._prompt_end = prompt_end
        self._config = config.structured_outputs_config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        eos = tuple(sorted(token_id for token_id in eos_token_ids if token_id < vocab_size))
        if not eos and tokenizer is not None and tokenizer.eos_token_id is not None:
            eos = (tokenizer.eos_token_id,)
        self._eos_token_ids = eos
        self._parser = (
            plugins["reasoning_parser"].load(config.reasoning_parser)
            if config.reasoning_parser is not None
            else None
        )
        self._store = GrammarStore(
            plugins["structured_backend"], self._config, self._make_vocabulary
        )

    async def prepare(
        self,
        params: SamplingParams,
        *,
        chat: bool,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> CompiledGrammar | None:
        """Compile a request's grammar, if any.

        template_arguments: may turn reasoning off.

        Raises InvalidRequest with the field's name.
        """
        structured = params.structured_outputs
        if structured is None:
            return None
        tokenizer = self._tokenizer
        if tokenizer is None or not self._eos_token_ids:
            missing = "no tokenizer" if tokenizer is None else "no end token"
            raise InvalidRequest(
                f"structured_outputs: this engine has {missing}", param="structured_outputs"
            )
        spec = grammar_spec(structured, self._config)
        grammar = await self._compile(structured, spec)
        gate = None
        waits = chat if structured.after_reasoning is None else structured.after_reasoning
        if waits and self._parser is not None:
            gate = make_reasoning_gate(
                self._parser,
                template_arguments or {},
                tokenizer,
                prompt_end=self._prompt_end(template_arguments),
                free=begins_free(spec),
            )
        return self._compiled(GrammarStart(self._eos_token_ids, gate), grammar, tokenizer)

    async def restore(self, params: SamplingParams, start: GrammarStart) -> CompiledGrammar:
        """Compile the grammar of a plan's slot in another process.

        Raises InvalidRequest with the field's name.
        """
        structured = params.structured_outputs
        if structured is None or self._tokenizer is None:
            missing = "parameters" if structured is None else "a tokenizer"
            raise InvalidRequest(
                f"structured_outputs: a grammar needs {missing}", param="structured_outputs"
            )
        grammar = await self._compile(structured, grammar_spec(structured, self._config))
        return self._compiled(start, grammar, self._tokenizer)

    async def _compile(self, structured: StructuredOutputsParams, spec: GrammarSpec) -> Grammar:
        try:
            return await self._store.compile(spec)
        except ValueError as error:
            field = field_of(structured)
            raise InvalidRequest(f"{field}: {error}", param=field) from None

    def _compiled(
        self, start: GrammarStart, grammar: Grammar, tokenizer: Tokenizer
    ) -> CompiledGrammar:
        gate = start.reasoning_gate
        return CompiledGrammar(
            start,
            grammar,
            token_bytes=tokenizer.token_bytes,
            encode=functools.partial(tokenizer.encode, add_special_tokens=False),
            reasoning_parser=None if gate is None else gate_parser(self._parser, gate),
        )

    async def close(self) -> None:
        await self._store.close()

    def _make_vocabulary(self) -> Vocabulary:
        """Build the vocabulary, on a pool thread."""
        assert self._tokenizer is not None
        return make_vocabulary(
            self._tokenizer,
            self._vocab_size,
            self._eos_token_ids,
            compact_json=self._config.disable_any_whitespace,
        )
