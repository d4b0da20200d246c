"""Beam search: the most likely outputs that a search of a certain width finds.

Each step asks the engine for one token of each beam, with the log-probabilities of the likeliest
ones; what the beams share is in the prefix cache.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..core.engine.async_engine import AsyncEngine
from ..core.errors import ContextLengthExceeded, InvalidRequest, shown
from ..core.outputs import CompletionOutput, PositionLogprobs, RequestOutput, RequestTimings
from ..core.sampling_params import MAX_N, OutputKind, SamplingParams


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to search. Names are vLLM's. Raises `InvalidRequest` with the field's name."""

    beam_width: int
    """Beams that go on after each step, and sequences that are returned; twice as many
    log-probabilities are read (`max_logprobs`)."""
    max_tokens: int
    """Tokens of a sequence, besides the prompt's."""
    ignore_eos: bool = False
    """Whether sequences go on after a token that ends the output."""
    temperature: float = 0.0
    """Kept for compatibility: sequences are compared by the model's own probabilities."""
    length_penalty: float = 1.0
    """Sequences are ranked by log-probability over length (the prompt's included) to this power."""
    include_stop_str_in_output: bool = False
    """Whether a sequence has the token that ended it in its text."""

    def __post_init__(self) -> None:
        for name, most in (("beam_width", MAX_N), ("max_tokens", 2**31 - 1)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise InvalidRequest(
                    f"{name}: must be an integer from 1 to {most}, got {shown(value)}", param=name
                )
        for name in ("temperature", "length_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e6:
                raise InvalidRequest(f"{name}: must be a number, got {shown(value)}", param=name)


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """A sequence that a search found."""

    tokens: list[int]
    """Prompt and output."""
    logprobs: list[PositionLogprobs]
    """[number of output tokens] What was known where each was chosen."""
    cum_logprob: float
    """Sum of the output tokens' log-probabilities."""
    text: str = ""
    """The prompt's text, where text was given, and the output's."""
    finish_reason: str | None = None
    """stop, or length."""


class BeamSearchOutput(msgspec.Struct, kw_only=True):
    """What `LLM.beam_search` returns for a prompt."""

    sequences: list[BeamSearchSequence]
    """The best first."""

    @classmethod
    def of(cls, output: RequestOutput) -> BeamSearchOutput:
        return cls(
            sequences=[
                BeamSearchSequence(
                    tokens=[*output.prompt_token_ids, *completion.token_ids],
                    logprobs=completion.logprobs or [],
                    cum_logprob=completion.cumulative_logprob or 0.0,
                    text=(output.prompt or "") + completion.text,
                    finish_reason=completion.finish_reason,
                )
                for completion in output.outputs
            ]
        )


class _Beam(NamedTuple):
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    total: float = 0.0
    ended: bool = False


class _Candidate(NamedTuple):
    beam: _Beam
    position: PositionLogprobs
    token: int

    @property
    def total(self) -> float:
        return self.beam.total + self.position[self.token].logprob


@dataclasses.dataclass
class BeamSearch:
    """The search over one prompt: an iterator over its one output."""

    engine: AsyncEngine
    prompt: str | None
    prompt_token_ids: Sequence[int]
    params: BeamSearchParams
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    """What special tokens become in texts, and how many log-probabilities outputs have."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of `AsyncEngine.generate`; `request_id` begins those of the steps."""
    width_field: str = "beam_width"
    """The caller's name of the width, for errors."""

    def __post_init__(self) -> None:
        # With a part that no client can give.
        self._name = f"{self.options.get('request_id', 'beams')}-{uuid.uuid4().hex}"

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """Yield the output: a completion a sequence, the best first. Raises InvalidRequest with the
        field's name, and as `AsyncEngine.generate`.
        """
        self._check()
        timings = RequestTimings(arrival=time.monotonic())
        beams, ended, cached = [_Beam()], list[_Beam](), 0
        for number in range(self.params.max_tokens):
            steps = await self._step(beams, number)
            cached = steps[0].num_cached_tokens if number == 0 else cached
            going, ending = self._candidates(beams, steps)
            beams = [self._grown(*each) for each in going]
            ended += [self._grown(*each)._replace(ended=True) for each in ending]
            ended = sorted(ended, key=self._score)[: self.params.beam_width]
            if not beams or self._is_decided(beams, ended):
                beams = []
                break
        timings.finished = time.monotonic()
        best = sorted([*ended, *beams], key=self._score)[: self.params.beam_width]
        yield RequestOutput(
            request_id=self.options.get("request_id", ""),
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[self._completion(index, beam) for index, beam in enumerate(best)],
            finished=True,
            num_cached_tokens=cached,
            timings=timings,
        )

    def _check(self) -> None:
        """Raise InvalidRequest where this engine cannot search so."""
        width, most = self.params.beam_width, self.engine.config.max_logprobs
        if 0 <= most < 2 * width:
            raise InvalidRequest(
                f"{self.width_field}: {width} beams need {2 * width} log-probabilities a token; "
                f"requests may have max_logprobs={most}",
                param=self.width_field,
            )
        if self.engine.model_config.source is not None:
            raise InvalidRequest(
                "use_beam_search: is not there for an encoder-decoder model",
                param="use_beam_search",
            )
        if self.engine.model_config.whole_prompts:
            raise InvalidRequest(
                "use_beam_search: is not there for a model whose prompts' tokens see each other: "
                "beams go on as prompts",
                param="use_beam_search",
            )
        length, context = len(self.prompt_token_ids), self.engine.model_config.max_model_len
        if length + self.params.max_tokens > context:
            field = self.sampling.max_tokens_field or "max_tokens"
            raise ContextLengthExceeded.of(
                context,
                length,
                f"your prompt has {length} tokens, and {field} is {self.params.max_tokens}. "
                f"Shorten the prompt, or lower {field}.",
                param=field,
            )
        if self.sampling.logprobs is not None:
            changes = {"n": width, "max_tokens": self.params.max_tokens}
            sampling = msgspec.structs.replace(self.sampling, **changes)
            self.engine.check_num_logprobs([length], sampling)

    async def _step(self, beams: Sequence[_Beam], number: int) -> list[RequestOutput]:
        """Return an output of one token of each beam. The first error aborts the others."""
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=max(2 * self.params.beam_width, self.sampling.logprobs or 0),
            ignore_eos=True,
            detokenize=False,
            output_kind=OutputKind.FINAL_ONLY,
        )

        async def advance(index: int, beam: _Beam) -> RequestOutput:
            prompt = [*self.prompt_token_ids, *beam.token_ids]
            options = {**self.options, "request_id": f"{self._name}-{number}-{index}"}
            output = await anext(self.engine.generate(prompt, sampling, **options))
            if output.outputs[0].finish_reason == "error":
                raise output.failure()
            return output

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(advance(index, beam)) for index, beam in enumerate(beams)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _candidates(
        self, beams: Sequence[_Beam], steps: Sequence[RequestOutput]
    ) -> tuple[list[_Candidate], list[_Candidate]]:
        """Return the likeliest ways to go on, as many as beams may be, and those that end."""
        candidates = [
            _Candidate(beam, position, token)
            for beam, step in zip(beams, steps, strict=True)
            for position in step.outputs[0].logprobs or ()
            for token in _likeliest(position)[: 2 * self.params.beam_width]
        ]
        ends = frozenset[int]()
        if not self.params.ignore_eos:
            ends = self.engine.model_config.eos_token_ids
        going = sorted((c for c in candidates if c.token not in ends), key=lambda c: -c.total)
        return going[: self.params.beam_width], [c for c in candidates if c.token in ends]

    def _grown(self, beam: _Beam, position: PositionLogprobs, token: int) -> _Beam:
        logprobs = beam.logprobs
        if self.sampling.logprobs is not None:
            logprobs = (*logprobs, {token: position[token], **position})
        return _Beam((*beam.token_ids, token), logprobs, beam.total + position[token].logprob)

    def _score(self, beam: _Beam) -> float:
        """Return by what sequences are ranked, the best first."""
        return self._score_at(beam.total, len(beam.token_ids) - beam.ended)

    def _score_at(self, total: float, num_tokens: int) -> float:
        length = len(self.prompt_token_ids) + num_tokens
        return -total / math.pow(max(length, 1), self.params.length_penalty)

    def _is_decided(self, beams: Sequence[_Beam], ended: Sequence[_Beam]) -> bool:
        """Return whether no beam can become better than those that have ended: its sum only falls,
        and its length grows at most to the limit.
        """
        if len(ended) < self.params.beam_width:
            return False
        lengths = (len(beams[0].token_ids), self.params.max_tokens)
        return min(self._score_at(beams[0].total, n) for n in lengths) >= self._score(ended[-1])

    def _completion(self, index: int, beam: _Beam) -> CompletionOutput:
        shown = list(beam.token_ids)
        if beam.ended and not self.params.include_stop_str_in_output:
            shown.pop()
        tokenizer = self.engine.tokenizer
        text = ""
        if tokenizer is not None:
            text = tokenizer.decode(
                shown,
                skip_special_tokens=self.sampling.skip_special_tokens,
                spaces_between_special_tokens=self.sampling.spaces_between_special_tokens,
            )
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=list(beam.token_ids),
            logprobs=None if self.sampling.logprobs is None else list(beam.logprobs),
            cumulative_logprob=beam.total,
            finish_reason="stop" if beam.ended else "length",
        )


def _likeliest(position: PositionLogprobs) -> list[int]:
    return sorted(position, key=lambda token: position[token].rank or 0)
