"""Where the microseconds of a streamed token go.

What runs once a step is timed as it runs, by the thread's processor time: two looks at the clock a
step cost nothing a token. What runs once a token is timed alone, over the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ...core.engine.async_engine import AsyncEngine
from ...core.text.detokenizer import IncrementalDetokenizer
from ...core.text.output_text import OutputText
from ...core.types import CompletionOutput, RequestOutput, RequestTimings
from ..openai.chat_job import ChatJob
from ..openai.chat_pieces import ChatPieces
from ..openai.context import tokenizer_of
from ..openai.protocol import ChatRequest, decode
from .scripted import ScriptedExecutor

STEP_PARTS = ("executor", "schedule", "update", "publish", "metrics", "deliver")


def watch_steps(engine: AsyncEngine, executor: ScriptedExecutor) -> None:
    """From now on, add up in `executor.parts` what each part of a step takes, in nanoseconds."""
    parts = executor.parts = dict.fromkeys(STEP_PARTS, 0)

    def watch(owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return inner(*arguments)
            finally:
                parts[part] += time.thread_time_ns() - began

        setattr(owner, name, timed)

    watch(executor, "submit", "executor")
    watch(engine._scheduler, "schedule", "schedule")
    watch(engine._scheduler, "update", "update")
    watch(engine._steps, "publish", "publish")
    watch(engine._steps, "stepped", "metrics")
    watch(engine._underway, "_deliver", "deliver")


def time_alone(
    engine: AsyncEngine, body: bytes, script: Sequence[int], streams: int
) -> dict[str, float]:
    """Microseconds a token of each part of a chat that runs once a token, over all streams."""
    asked = decode(body, ChatRequest)
    jobs = [ChatJob(engine, asked) for _ in range(streams)]
    params = jobs[0].params
    tokens = [(token,) for token in script]

    def detokenizer() -> Callable[[int], object]:
        one = IncrementalDetokenizer(
            tokenizer_of(engine), (), skip_special_tokens=params.skip_special_tokens
        )
        return lambda at: one.push(tokens[at])

    def text() -> Callable[[int], object]:
        one = OutputText(engine.tokenizer, (), params)
        return lambda at: one.push(tokens[at], at + 1)

    shown = OutputText(engine.tokenizer, (), params)
    outputs: list[RequestOutput] = []
    for at, token in enumerate(script):
        shown.push([token], at + 1)
        completion = CompletionOutput(index=0, text=shown.take_delta(), token_ids=[token])
        outputs.append(
            RequestOutput(
                request_id="", prompt=None, prompt_token_ids=[], prompt_logprobs=None,
                outputs=[completion], finished=False, num_cached_tokens=0,
                timings=RequestTimings(arrival=0.0), error=None,
            )
        )  # fmt: skip

    def parser(job: ChatJob) -> Callable[[int], object]:
        choice = job.new_choice()

        def parse(at: int) -> None:
            completion = outputs[at].outputs[0]
            choice.count(completion)
            if not choice.parser.plain:
                choice.feed(completion)

        return parse

    def encoder(job: ChatJob) -> Callable[[int], object]:
        pieces = ChatPieces(job)
        return lambda at: pieces.encode(outputs[at])

    steps = len(script)
    nothing = _microseconds([lambda at: None for _ in range(streams)], steps)
    detokenize = _microseconds([detokenizer() for _ in range(streams)], steps) - nothing
    push = _microseconds([text() for _ in range(streams)], steps) - nothing
    parse = _microseconds([parser(job) for job in jobs], steps) - nothing
    encode = _microseconds([encoder(job) for job in jobs], steps) - nothing
    return {
        "detokenize": detokenize,
        "stop strings": max(0.0, push - detokenize),
        "parse": parse,
        "encode": max(0.0, encode - parse),
    }


def _microseconds(streams: Sequence[Callable[[int], object]], steps: int) -> float:
    """A call, over all streams in turn at each step."""
    began = time.thread_time()
    for step in range(steps):
        for stream in streams:
            stream(step)
    return 1e6 * (time.thread_time() - began) / (steps * len(streams))
