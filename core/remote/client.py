"""`RemoteEngine`: what an `AsyncEngine` is to its callers, over an engine in another process.

Prompts are tokenized here, and texts made here: detokenizing, stop strings, log-probabilities as
text. Scheduling, grammars and the model are the other process's, which also counts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..engine.admission import Admission
from ..engine.async_engine import HEALTH_SECONDS, AsyncEngine
from ..engine.output import Completion, RequestState
from ..engine.pooling import PoolingAdmission, PoolingState
from ..engine.resolve import resolve_runner
from ..engine.underway import State
from ..errors import EngineStopped
from ..extra_args import ExtraArgs
from ..loading.model_config import resolve_model_config
from ..observe.merge import families
from ..observe.plugin_metrics import add_plugin_metrics
from ..registry import Plugins
from ..scheduling.request import Update
from ..types import EngineStats
from .channel import Channel
from .frames import (
    Abort,
    Answer,
    Change,
    Close,
    Encode,
    Generate,
    Hello,
    Listening,
    Refused,
    Report,
    Status,
    Stop,
    ToFront,
    Tokens,
    WantReport,
    Welcome,
)
from .questions import Questions
from .stand_ins import FrontMetrics, GrammarWishes


class RemoteEngine(AsyncEngine):
    """The engine behind a Unix socket. Made and used as an `AsyncEngine`.

    `stats` are those of the last second. Plugins hear of `request_finished` here, and of the other
    events where the engine is.
    """

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        *,
        front: int = 0,
        plugins: Plugins | None = None,
    ) -> None:
        """path: the engine's socket; front: this process's number among its front ends."""
        super().__init__(config, plugins=plugins)
        self.path = path
        self.front = front
        self.closed = asyncio.Event()
        """Set when the engine says that nothing more will come, or is lost."""
        self.lost = False
        """Whether the connection has ended, and not by `stop`."""
        self.count_load: Callable[[], int] = lambda: 0
        """Requests for work under way in this process."""
        self._channel: Channel[ToFront] = Channel(ToFront, received=self._received, lost=self._lost)
        self._welcome: asyncio.Future[Welcome] | None = None
        self._questions = Questions(self._channel)
        self._open: dict[int, tuple[State, Any]] = {}
        """By number: the completions that have not ended, and their requests."""
        self._numbers: dict[str, int] = {}
        """Request id → the number of its first completion."""
        self._stops: dict[int, str] = {}
        """Completions that a stop string has ended, until the engine says so, too."""
        self._stats = EngineStats()

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Connect, and wait until the engine is ready. Raises EngineStopped when it ends first."""
        if self._started:
            raise EngineStopped("this engine was started before; make a new one")
        self._started = True
        loop = asyncio.get_running_loop()
        self._welcome = loop.create_future()
        await loop.create_unix_connection(lambda: self._channel, str(self.path))
        self._questions.send(Hello(self.front, os.getpid()))
        # What takes time here goes on while the engine loads its model. What is wrong with the
        # checkpoint is the engine's to tell.
        loading = asyncio.create_task(asyncio.to_thread(self._load))
        await asyncio.wait([loading])
        welcome = await self._welcome
        loading.result()
        self.config, self.info = welcome.config, welcome.info
        model_config = await asyncio.to_thread(resolve_model_config, self.config, self.plugins)
        _, self.model_config = await asyncio.to_thread(
            resolve_runner, self.config, self.config, model_config, self.plugins
        )
        self._serve()

    def _load(self) -> None:
        self.model_config = resolve_model_config(self.config, self.plugins)
        self._load_text()

    def _serve(self) -> None:
        config, pooling = self.config, self.model_config.pooling
        self.metrics = FrontMetrics()  # type: ignore[assignment]
        add_plugin_metrics(self.plugins, self.metrics.registry, self)
        self._admission = Admission(
            self.model_config,
            self.tokenizer,
            seed=config.seed,
            max_logprobs=config.max_logprobs,
            cache_tokens=(self.info.num_blocks - 1) * config.block_size,
            extra_args=ExtraArgs(self.plugins, config),
        )
        self._grammars = GrammarWishes(config.structured_outputs_config)  # type: ignore[assignment]
        self._pooling_admission = (
            PoolingAdmission(self.model_config, pooling, self.tokenizer) if pooling else None
        )
        self._watch_requests = self.plugins.has_listeners("request_finished")
        self._accepting = self.dead_reason is None

    def listening(self) -> None:
        """Tell the engine that clients can connect."""
        self._questions.send(Listening())

    async def stop(self) -> None:
        """Abort what is running, and leave the engine. Safe to call twice."""
        self._accepting = False
        for state in list(self._underway.states.values()):
            self._abort(state)
        await self._listeners_done()
        self._channel.lost = None
        self._channel.close()
        self._fail("this process is stopping")

    # ------------------------------------------------------------ questions

    async def check_health(self, timeout: float = HEALTH_SECONDS) -> None:
        """Ask the engine's step loop and worker whether they live. Raises EngineStopped."""
        if not self.healthy:
            raise EngineStopped(self.dead_reason or "the engine is not running")
        try:
            await asyncio.wait_for(self._questions.ask("health"), timeout)
        except TimeoutError:
            raise EngineStopped(f"the engine has not answered for {timeout:g} seconds") from None

    async def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; → False when some are in use."""
        return bool(await self._questions.ask("reset_prefix_cache"))

    async def render_metrics(self) -> bytes:
        """The engine's, and those of all its front ends added up."""
        return bytes(await self._questions.ask("metrics"))

    async def server_load(self) -> int:
        """Requests for work under way in all front ends."""
        return int(await self._questions.ask("load"))

    def stats(self) -> EngineStats:
        """A snapshot of the engine, at most a second old while it works."""
        return self._stats

    # ------------------------------------------------------------ requests

    async def _begin(self, state: State) -> None:
        """Have it admitted. Its tokens may come with the answer, so it is known before."""
        self._underway.add(state)
        number = self._questions.numbers(len(state.requests))
        self._numbers[state.request_id] = number
        for index, completion in enumerate(state.completions):
            self._open[number + index] = (state, completion)
        try:
            await self._questions.answer(number, _asked(state, number))
        except asyncio.CancelledError:
            self._abort(state)
            raise
        except BaseException:
            self._forget(state)
            raise

    def _check_room(self) -> None:
        """The engine looks at its limits, and at the other front ends' ids."""

    def _abort(self, state: State) -> None:
        """End what is left of a request, at once; the engine hears of it."""
        first = self._numbers.get(state.request_id)
        if first is None or state.finished:
            return
        numbers = range(first, first + len(state.completions))
        self._channel.send(Abort([number for number in numbers if number in self._open]))
        for completion in state.completions:
            completion.finish("abort", None)
        self._end(state)

    def _forget(self, state: State) -> None:
        first = self._numbers.pop(state.request_id, None)
        if first is None:
            return
        for number in range(first, first + len(state.completions)):
            self._open.pop(number, None)
            self._stops.pop(number, None)
        self._underway.remove(state)

    def _end(self, state: State) -> None:
        """All of its completions have ended."""
        self._forget(state)
        state.mark_finished()
        if self._watch_requests:
            if isinstance(state, RequestState):
                self._request_finished(state.peek())
            elif state.pooled.row is not None:
                self._request_finished(state.output())
        self._underway.tell(state)

    # ------------------------------------------------------------ what comes

    def _received(self, message: ToFront) -> None:
        match message:
            case Tokens():
                self._take(message)
            case Answer() | Refused():
                self._questions.settle(message)
            case Status():
                self._stats = message.stats
                if message.dead_reason is not None:
                    self._fail(message.dead_reason)
                self._accepting = self._accepting and message.accepting
            case WantReport():
                told = families(self.metrics.registry)
                self._questions.send(Report(message.number, self.count_load(), told))
            case Welcome():
                if self._welcome is not None and not self._welcome.done():
                    self._welcome.set_result(message)
            case Close():
                self._accepting = False
                self.closed.set()
                if self._welcome is not None and not self._welcome.done():
                    self._welcome.set_exception(EngineStopped("the engine is stopping"))

    def _take(self, tokens: Tokens) -> None:
        """Give a step's tokens to their streams."""
        now = time.monotonic()
        known = self._open
        for number, token_id in zip(tokens.numbers, tokens.token_ids, strict=True):
            found = known.get(number)
            if found is None or number in self._stops:
                continue  # It has ended here, and the engine is about to hear of it.
            state, completion = found
            state.timings.last_token = now
            stop = completion.apply_tokens((token_id,))
            if stop is not None:
                self._stop(number, stop)
            self._underway.tell(state)
        for change in tokens.changes:
            found = known.get(change.number)
            if found is None:
                continue
            state, completion = found
            if isinstance(state, PoolingState):
                self._take_pooled(state, change)
            else:
                self._change(state, completion, change, now)

    def _stop(self, number: int, stop: str) -> None:
        """A stop string ends a completion, once the engine has stopped it."""
        self._stops[number] = stop
        self._channel.send(Stop(number, stop))

    def _change(
        self, state: RequestState, completion: Completion, change: Change, now: float
    ) -> None:
        number, request = change.number, completion.request
        ended = change.finish_reason is not None
        if change.num_cached_tokens is not None:
            request.num_cached_tokens = change.num_cached_tokens
            request.first_scheduled = change.first_scheduled
            request.num_preemptions = change.num_preemptions
        if ended:
            request.finish_reason = change.finish_reason
            request.stop_reason = change.stop_reason
            request.kv_transfer_params = change.kv_transfer_params
            state.error = change.error or state.error
        if change.prompt_logprobs:
            state.add_prompt_logprobs(change.prompt_logprobs)
        stop = self._stops.get(number)
        if change.token_ids and stop is None:
            state.mark_tokens(now)
            stop = completion.apply(
                Update(request, change.token_ids, change.logprobs or None, finished=ended)
            )
            if stop is not None and not ended:
                self._stop(number, stop)
        if ended:
            if stop is not None and change.finish_reason != "error":
                completion.finish("stop", stop)
            else:
                completion.finish(change.finish_reason or "abort", change.stop_reason)
            del self._open[number]
            self._stops.pop(number, None)
        if state.finished:
            self._end(state)
        else:
            self._underway.tell(state)

    def _take_pooled(self, state: PoolingState, change: Change) -> None:
        request = state.requests[0]
        request.num_cached_tokens = change.num_cached_tokens or 0
        request.first_scheduled = change.first_scheduled
        request.num_preemptions = change.num_preemptions
        state.pooled.row, state.error = change.pooled, change.error
        state.pooled.finish(change.finish_reason or "abort")
        self._end(state)

    def _lost(self) -> None:
        self.lost = True
        self._fail("the engine's process has ended")

    def _fail(self, reason: str) -> None:
        """The engine is gone: every request ends with an error, and no more are taken."""
        if self._accepting or self.dead_reason is None:
            self.dead_reason = self.dead_reason or reason
        self._accepting = False
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(EngineStopped(reason))
        self._questions.fail(reason)
        for state in list(self._underway.states.values()):
            state.error = state.error or f"the engine died: {reason}"
            for completion in state.completions:
                completion.finish("error", None)
            self._end(state)
        self.closed.set()


def _asked(state: State, number: int) -> Generate | Encode:
    """A request as the engine is asked for it; number: of its first completion."""
    request = state.requests[0]
    same: dict[str, Any] = {
        "number": number,
        "request_id": state.request_id,
        "prompt_token_ids": request.prompt_token_ids,
        "priority": request.priority,
        "cache_salt": request.cache_salt,
    }
    if request.pooling is not None:
        return Encode(**same, token_type_ids=request.token_type_ids, params=request.pooling)
    wish = None if request.grammar is None else request.grammar.grammar
    return Generate(**same, params=request.params, grammar=wish)
