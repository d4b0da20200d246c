"""Breakdown of the microseconds per streamed token.

Work per step is timed while it runs, by the thread's processor time: reading the clock twice per
step costs next to nothing per token. Work per token is timed separately, over the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from jackfield.core.engine.async_engine import AsyncEngine
from jackfield.core.engine.core import EngineCore
from jackfield.core.output_parsing.output_text import OutputText
from jackfield.core.outputs import CompletionOutput, RequestOutput, RequestTimings
from jackfield.core.text.detokenizer import IncrementalDetokenizer
from jackfield.entrypoints.http.context import tokenizer_of
from jackfield.entrypoints.openai.chat.job import new_job
from jackfield.entrypoints.openai.chat.request import ChatCompletion
from jackfield.entrypoints.openai.chat.stream import ChatStream
from jackfield.entrypoints.openai.common.decoding import decode
from jackfield.entrypoints.openai.common.protocol import ChatRequest

from .fake_executor import ScriptedExecutor

STEP_PARTS = ("executor", "schedule", "update", "publish", "metrics", "deliver")


def watch_steps(engine: AsyncEngine, executor: ScriptedExecutor) -> None:
    """Start adding up in `executor.parts` the nanoseconds that each part of a step takes."""
    parts = executor.parts = dict.fromkeys(STEP_PARTS, 0)

    def watch(owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            start = time.thread_time_ns()
            try:
                return inner(*arguments)
            finally:
                parts[part] += time.thread_time_ns() - start

        setattr(owner, name, timed)

    watch(executor, "submit", "executor")
    core = engine.core
    assert isinstance(core, EngineCore)
    watch(core.scheduler, "schedule", "schedule")
    watch(core.scheduler, "update", "update")
    watch(core.steps, "publish", "publish")
    watch(core.steps, "stepped", "metrics")
    watch(core.requests, "_deliver", "deliver")


def time_alone(
    engine: AsyncEngine, body: bytes, script: Sequence[int], streams: int
) -> dict[str, float]:
    """Return the microseconds per token of each per-token part of a chat, over all streams."""
    request = decode(body, ChatRequest)
    chats = [ChatCompletion(new_job(engine, request, str(index))) for index in range(streams)]
    params = chats[0].job.params
    tokens = [(token,) for token in script]

    def detokenizer() -> Callable[[int], object]:
        incremental = IncrementalDetokenizer(
            tokenizer_of(engine), (), skip_special_tokens=params.skip_special_tokens
        )
        return lambda at: incremental.push(tokens[at])

    def text() -> Callable[[int], object]:
        visible_text = OutputText(engine.tokenizer, (), params)
        return lambda at: visible_text.push(tokens[at], at + 1)

    output_text = OutputText(engine.tokenizer, (), params)
    outputs: list[RequestOutput] = []
    for at, token in enumerate(script):
        output_text.push([token], at + 1)
        completion = CompletionOutput(
            index=0,
            text=output_text.take_delta(),
            token_ids=[token],
            token_ends=output_text.token_ends[-1:],
        )
        outputs.append(
            RequestOutput(
                request_id="", prompt=None, prompt_token_ids=[], prompt_logprobs=None,
                outputs=[completion], finished=False, num_cached_tokens=0,
                timings=RequestTimings(arrival=0.0), error=None,
            )
        )  # fmt: skip

    def parser(chat: ChatCompletion) -> Callable[[int], object]:
        choice = chat.job.new_choice()

        def parse(at: int) -> None:
            completion = outputs[at].outputs[0]
            if choice.parser.plain:
                choice.parser.count(completion)
            else:
                choice.parse(completion)

        return parse

    def encoder(chat: ChatCompletion) -> Callable[[int], object]:
        pieces = ChatStream(chat)
        return lambda at: pieces.encode(outputs[at])

    steps = len(script)
    nothing = _microseconds([lambda at: None for _ in range(streams)], steps)
    detokenize = _microseconds([detokenizer() for _ in range(streams)], steps) - nothing
    push = _microseconds([text() for _ in range(streams)], steps) - nothing
    parse = _microseconds([parser(chat) for chat in chats], steps) - nothing
    encode = _microseconds([encoder(chat) for chat in chats], steps) - nothing
    return {
        "detokenize": detokenize,
        "stop strings": max(0.0, push - detokenize),
        "parse": parse,
        "encode": max(0.0, encode - parse),
    }


def _microseconds(streams: Sequence[Callable[[int], object]], steps: int) -> float:
    """Return the microseconds of one call, averaged over all streams, called in turn at each
    step."""
    start = time.thread_time()
    for step in range(steps):
        for stream in streams:
            stream(step)
    return 1e6 * (time.thread_time() - start) / (steps * len(streams))
