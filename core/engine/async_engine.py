"""`AsyncEngine`: the engine inside somebody's own asyncio program.

async with AsyncEngine(EngineConfig(model="path")) as engine:
    async for output in engine.generate("Once", SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ..config import EngineConfig
from ..errors import (
    EngineOverloaded,
    EngineStopped,
    InvalidRequest,
    PluginError,
    shown,
)
from ..extra_args import ExtraArgs
from ..loading.generation_config import NO_DEFAULTS
from ..loading.model_config import ModelConfig, resolve_model_config
from ..observe.metrics import EngineMetrics
from ..observe.plugin_metrics import add_plugin_metrics
from ..pooling import PoolingParams
from ..protocols import Executor, ExecutorInfo, KVConnectorScheduler, SchedulePolicy
from ..registry import Plugins, load_plugins
from ..scheduling.scheduler import Scheduler
from ..text.chat import ChatTemplate
from ..text.encoding import LONG_TEXT
from ..text.text_threads import TextThreads, rough_size
from ..text.token_limit import TokenLimit
from ..text.tokenizer import Tokenizer
from ..types import (
    MAX_NAME_LENGTH,
    ChatMessage,
    EngineStats,
    GrammarStart,
    PoolingRequestOutput,
    Prompt,
    RequestOutput,
    SamplingParams,
    StepPlan,
    StepResult,
)
from .admission import Admission, BadWords
from .connecting import connect, watch_transfers
from .grammars import Grammars
from .output import OutputStream, RequestState
from .pooling import (
    PoolingAdmission,
    PoolingPrompt,
    PoolingState,
    PoolingStream,
    PreparedPrompt,
)
from .resolve import check_names, resolve_config, resolve_parsers, resolve_runner
from .step_loop import StepLoop
from .underway import Publisher, State, Underway

logger = logging.getLogger("jackfield.engine")
T = TypeVar("T")
MAX_TOKENIZED = 1 << 17
"""Tokens of a text that is tokenized for its own sake; or four times the context, where that is
more."""
FEW_WORDS = 16
"""Bad words that are tokenized on the event loop."""
HEALTH_SECONDS = 30.0
"""A worker that neither answers nor ends a step for so long is at fault."""


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """At the end of an engine: log what fails, and go on."""
    try:
        yield
    except Exception:
        logger.exception("%s failed", what)


def _check_name(param: str, name: str) -> None:
    """Raises InvalidRequest for what is no text, or too long to be kept."""
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH:
        raise InvalidRequest(
            f"{param}: must be a text of at most {MAX_NAME_LENGTH} characters, got {shown(name)}",
            param=param,
        )


class AsyncEngine:
    """Schedules requests onto an in-process worker. Many may live in one process.

    Use as an async context manager, or call `start` and `stop`. All methods belong to the event
    loop that started it.
    """

    config: EngineConfig
    """Resolved at start: `device` and `max_num_batched_tokens` are concrete."""
    model_config: ModelConfig
    info: ExecutorInfo
    tokenizer: Tokenizer | None
    metrics: EngineMetrics

    def __init__(self, config: EngineConfig, *, plugins: Plugins | None = None) -> None:
        """`plugins`: what to use instead of everything that is installed."""
        self.config = config
        self.plugins = (
            plugins if plugins is not None else load_plugins(disable=config.disable_plugins)
        )
        self.plugins.configure(config.plugin_options)
        self.tokenizer = None
        self.dead_reason: str | None = None
        self._chat_template: ChatTemplate | None = None
        self._prompt_ends: dict[Any, str] = {}
        """Switches of the chat template → what it writes last then."""
        self.chat_template_variables: frozenset[str] = frozenset()
        """What the model's chat template reads besides messages and tools: names that
        `chat_template_kwargs` may set."""
        self._underway = Underway()
        self._text_threads = TextThreads()
        self._started = False
        self._accepting = False
        self._background: set[asyncio.Task[Any]] = set()
        self._num_steps = 0
        self._connector: KVConnectorScheduler | None = None
        self._ping: asyncio.Future[None] | None = None
        """One for all who ask at the same time, so that they do not queue up behind a hung step."""

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Load the model and begin to serve. Raises ConfigError, LoadError, OutOfMemory."""
        if self._started:
            raise EngineStopped("this engine was started before; make a new one")
        self._started = True
        began = time.monotonic()
        check_names(self.config, self.plugins)
        asked, self.config = self.config, resolve_config(self.config)
        executor_class = self.plugins["executor"].load(self.config.executor)
        get_ready = getattr(executor_class, "get_ready", lambda config, plugins: None)
        ready = asyncio.ensure_future(asyncio.to_thread(get_ready, self.config, self.plugins))
        try:
            self.model_config = await asyncio.to_thread(
                resolve_model_config, self.config, self.plugins
            )
        finally:
            # What is wrong with the device is told by the executor's start, which asks it again.
            await asyncio.gather(ready, return_exceptions=True)
        self.config, self.model_config = await asyncio.to_thread(
            resolve_runner, asked, self.config, self.model_config, self.plugins
        )
        self.config = resolve_parsers(self.config, self.model_config, self.plugins)
        executors, name = self.plugins["executor"], self.config.executor
        with executors.calling(name, "its constructor"):
            self._executor: Executor = executor_class(self.config, self.model_config, self.plugins)
        if self.config.kv_transfer_config is not None:
            watch_transfers(self._executor, self._on_transfers)
        with executors.calling(name, "start"):
            starting = asyncio.ensure_future(self._executor.start())
        try:
            await asyncio.to_thread(self._load_text)
            with executors.calling(name, "start"):
                self.info = await starting
            self._connector = connect(self.config, self.info, self.plugins, self._wake)
            self._serve()
        except BaseException:
            await asyncio.gather(starting, return_exceptions=True)
            await self._executor.stop()
            raise
        logger.info(
            "ready in %.1f s: %s on %s (%s), attention %s (%s), %d KV blocks of %d tokens",
            time.monotonic() - began,
            self.model_config.architecture,
            self.info.device,
            self.info.dtype,
            self.info.attention_backend,
            self.info.attention_reason,
            self.info.num_blocks,
            self.config.block_size,
        )
        if self.model_config.sampling != NO_DEFAULTS:
            logger.info("requests that leave it open get %s", self.model_config.sampling)
        await self.plugins.emit("engine_started", engine=self)

    def _load_text(self) -> None:
        if self.config.skip_tokenizer_init:
            return
        source = self.config.tokenizer or str(self.model_config.path)
        self.tokenizer = Tokenizer.load(
            source,
            revision=self.config.tokenizer_revision,
            chat_template=self.config.chat_template,
        )
        if self.tokenizer.chat_templates:
            self._chat_template = self._template(self.tokenizer.chat_templates)
            self.chat_template_variables = self._chat_template.variables

    def _template(self, source: str | Mapping[str, str]) -> ChatTemplate:
        trusted = self.config.assistant_control_tokens
        return ChatTemplate(source, self.tokenizer, assistant_control_tokens=trusted)

    def _serve(self) -> None:
        config = self.config
        assert config.max_num_batched_tokens is not None
        self.metrics = EngineMetrics(self.served_model_names[0])
        self.metrics.observe_cache_config(
            block_size=config.block_size,
            num_gpu_blocks=self.info.num_blocks,
            cache_dtype=config.kv_cache_dtype,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        add_plugin_metrics(self.plugins, self.metrics.registry, self)
        self._admission = Admission(
            self.model_config,
            self.tokenizer,
            seed=config.seed,
            max_logprobs=config.max_logprobs,
            cache_tokens=(self.info.num_blocks - 1) * config.block_size,
            extra_args=ExtraArgs(self.plugins, config),
        )
        self._grammars = Grammars(
            self.plugins,
            config,
            self.tokenizer,
            self.model_config.vocab_size,
            self.model_config.eos_token_ids,
            self.prompt_end,
        )
        pooling = self.model_config.pooling
        self._pooling_admission = (
            PoolingAdmission(self.model_config, pooling, self.tokenizer) if pooling else None
        )
        self._scheduler = Scheduler(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            # A vector stands behind the last token, where a prompt may fill the whole context.
            max_model_len=self.model_config.max_model_len + (pooling is not None),
            num_blocks=self.info.num_blocks,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            enable_chunked_prefill=config.enable_chunked_prefill
            and (pooling is None or pooling.causal),
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy=self._policy(),
            policy_name=self.plugins["schedule_policy"].described(config.scheduling_policy),
            connector=self._connector,
            transfer=config.kv_transfer_config,
            hash_key=None if self.info.kv_layout is None else self.info.kv_layout.fingerprint,
        )
        listened = self.plugins.has_listeners("request_finished")
        self._publisher = Publisher(
            self._underway, self._scheduler, self.metrics,
            self._request_finished if listened else None,
        )  # fmt: skip
        self._steps = StepLoop(
            self._scheduler,
            self._executor,
            publish=self._publisher.publish,
            recoverable=self._connector is None,
            stepped=self._stepped,
            died=self._die,
        )
        self._watch_steps = self.plugins.has_listeners("step_finished")
        self._steps.start()
        self._accepting = True

    def _policy(self) -> SchedulePolicy:
        """Raises PluginError where the policy cannot be made."""
        registry, name = self.plugins["schedule_policy"], self.config.scheduling_policy
        made = registry.load(name)
        try:
            policy: SchedulePolicy = made()
            if not callable(policy.key):
                raise TypeError("`key` cannot be called")
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            raise PluginError(f"{registry.described(name)} cannot be made: {told}") from error
        return policy

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests; wait for the running ones, at most `timeout` seconds.

        → whether all of them finished.
        """
        self._accepting = False
        try:
            await asyncio.wait_for(self._underway.idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Abort what is running and free the device. Safe to call twice.

        What a part raises at its end is logged: the others end all the same.
        """
        self._accepting = False
        if not hasattr(self, "_steps"):
            return
        for state in list(self._underway.states.values()):
            with _logged(f"aborting request {state.request_id}"):
                self._abort(state)
        await self._listeners_done()
        await self.plugins.emit("engine_stopping", engine=self)
        with _logged("stopping the step loop"):
            await self._steps.stop()
        with _logged("closing the grammars"):
            await self._grammars.close()
        self._text_threads.close()
        if self._connector is not None:
            with _logged("closing the KV connector"):
                self._connector.close()
        with _logged("stopping the executor"):
            await self._executor.stop()
        await self._listeners_done()

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # ------------------------------------------------------------ requests

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> OutputStream:
        """Complete `prompt` (text, token ids or `{"prompt_token_ids": [...]}`).

        Without `params`, as the model's makers say (`model_config.sampling`).

        → async iterator of RequestOutput. Its first step raises InvalidRequest (with the field's
        name), EngineOverloaded or EngineStopped.
        """

        async def start() -> RequestState:
            self._check_running()
            asked = self._sampling(params)
            grammar = await self._grammars.prepare(asked, chat=False)
            return await self._admit(prompt, asked, request_id, priority, cache_salt, grammar)

        return OutputStream(start, self._abort)

    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_special_tokens: bool = False,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> OutputStream:
        """Answer OpenAI-style messages through the model's chat template, or the one given."""

        async def start() -> RequestState:
            self._check_running()
            self._check_generates()
            asked = self._sampling(params)
            grammar = await self._grammars.prepare(
                asked, chat=True, template_arguments=chat_template_kwargs
            )
            token_ids = await self.tokenize_chat(
                messages,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                documents=documents,
                chat_template=chat_template,
                add_special_tokens=add_special_tokens,
                limit=self._admission.token_limit(asked, "messages"),
            )
            return await self._admit(token_ids, asked, request_id, priority, cache_salt, grammar)

        return OutputStream(start, self._abort)

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_special_tokens: bool = False,
        limit: TokenLimit | None = None,
    ) -> list[int]:
        """The prompt's token ids, as `chat` would send them; blocks (see `tokenize_chat`).

        limit: how many tokens, and what happens to more; None: as `tokenize_limit`.
        """
        template = self._chat_template
        if chat_template is not None:
            template = self._template(chat_template)
        if template is None:
            raise InvalidRequest(
                "messages: this model has no chat template; give one with chat_template, or use "
                "completions",
                param="messages",
            )
        return template.render_tokens(
            messages,
            tools=None if tools is None else list(tools),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=chat_template_kwargs,
            documents=documents,
            add_special_tokens=add_special_tokens,
            limit=limit or self.tokenize_limit("messages"),
        )

    def prompt_end(self, chat_template_kwargs: Mapping[str, Any] | None = None) -> str:
        """What the model's chat template writes last before a response, as far as switches tell:
        arguments that are booleans or words. "" where that is not known.
        """
        if self._chat_template is None:
            return ""
        switches = {
            name: value
            for name, value in (chat_template_kwargs or {}).items()
            if isinstance(value, bool | str | None) and len(str(value)) < 17
        }
        key = tuple(sorted(switches.items(), key=repr))
        if key not in self._prompt_ends:
            try:
                text = self._chat_template.render(
                    [{"role": "user", "content": "."}], template_kwargs=switches
                )
            except InvalidRequest:
                text = ""
            if len(self._prompt_ends) > 99:
                self._prompt_ends.clear()
            self._prompt_ends[key] = text[-256:]
        return self._prompt_ends[key]

    async def tokenize_chat(self, messages: Sequence[ChatMessage], **options: Any) -> list[int]:
        """`render_chat`, with its options, on a thread for texts. Raises as it does, and
        EngineOverloaded where too many texts wait."""
        render = functools.partial(self.render_chat, messages, **options)
        size = rough_size(
            messages, options.get("tools"), options.get("documents"), options.get("chat_template")
        )
        return await self._text_threads.run(size, render)

    async def tokenize_texts(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        limit: TokenLimit | None = None,
    ) -> list[list[int]]:
        """Token ids of each text; long ones are encoded on a thread for texts.

        limit: of each one; None: as `tokenize_limit`. Raises what the limit says, and
        EngineOverloaded where too many texts wait.
        """
        tokenizer, limit = self.tokenizer, limit or self.tokenize_limit("prompt")
        if tokenizer is None:
            raise InvalidRequest(
                "prompt: this engine has no tokenizer (skip_tokenizer_init), send token ids",
                param="prompt",
            )
        size = sum(map(len, texts))

        def encoded() -> list[list[int]]:
            return [
                tokenizer.encode(text, add_special_tokens=add_special_tokens, limit=limit)
                for text in texts
            ]

        return encoded() if size < LONG_TEXT else await self._text_threads.run(size, encoded)

    def prompt_limit(self, params: SamplingParams, param: str = "prompt") -> TokenLimit:
        """What is tokenized of the text of a prompt with these parameters."""
        return self._admission.token_limit(params, param)

    def tokenize_limit(self, param: str) -> TokenLimit:
        """What is tokenized for its own sake: more than the context holds, to count it."""
        context = self.model_config.max_model_len
        return TokenLimit(tokens=max(MAX_TOKENIZED, 4 * context), context=context, param=param)

    async def in_text_threads(self, size: int, work: Callable[[], T]) -> T:
        """Other work on a text of `size` characters. Raises EngineOverloaded, as above."""
        return await self._text_threads.run(size, work)

    async def abort(self, request_id: str) -> bool:
        """End a request; its stream gets a last output with finish_reason "abort".

        → whether there was one.
        """
        state = self._underway.states.get(request_id)
        if state is None:
            return False
        self._abort(state)
        return True

    def encode(
        self,
        prompt: PoolingPrompt,
        params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> PoolingStream:
        """A vector for `prompt`: text, token ids, or a pair of texts for a cross-encoder.

        → await it for the PoolingRequestOutput, or iterate over the one. Raises InvalidRequest
        (with the field's name), EngineOverloaded, EngineStopped, and RequestFailed where the
        request alone fails or is aborted.
        """

        async def start() -> PoolingState:
            self._check_running()
            admission = self._pooling_admission
            if admission is None:
                raise InvalidRequest(self._wrong_kind("encode"), param="model")
            wanted = admission.pooling.completed(params or PoolingParams())
            prepared = await admission.prepare(
                prompt, wanted, add_special_tokens, self._text_threads
            )
            return await self._admit_pooling(prepared, wanted, request_id, priority, cache_salt)

        return PoolingStream(start, self._abort)

    async def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; → False when some are in use. Raises EngineStopped before start."""
        self._check_started()
        return self._scheduler.reset_prefix_cache()

    # ------------------------------------------------------------ state

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What this engine does: ("generate",), or tasks of PoolingParams, its default first."""
        pooling = self.model_config.pooling
        return ("generate",) if pooling is None else pooling.tasks

    @property
    def healthy(self) -> bool:
        """Takes requests: started, neither draining nor stopped, and the device works."""
        return self._accepting and self.dead_reason is None

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """Names to answer to; the first one is told in responses."""
        if self.config.served_model_name:
            return self.config.served_model_name
        return (self.config.model or "jackfield-tiny",)

    async def check_health(self, timeout: float = HEALTH_SECONDS) -> None:
        """Ask the step loop and the worker whether they live. Raises EngineStopped.

        A worker that has not answered within `timeout` seconds is at fault only if no step ended
        meanwhile.
        """
        if not self.healthy or not self._steps.running:
            raise EngineStopped(self.dead_reason or "the engine is not running")
        ping = getattr(self._executor, "ping", None)
        if ping is None:
            return
        before = self._num_steps
        try:
            if self._ping is None or self._ping.done():
                self._ping = asyncio.ensure_future(ping())
            await asyncio.wait_for(asyncio.shield(self._ping), timeout)
        except TimeoutError:
            if self._num_steps == before:
                raise EngineStopped(
                    f"the worker has not answered for {timeout:g} seconds"
                ) from None
        except RuntimeError as error:
            raise EngineStopped(f"the worker does not answer: {error}") from None

    def stats(self) -> EngineStats:
        """A snapshot, cheap to take. Raises EngineStopped before start."""
        self._check_started()
        return msgspec.structs.replace(
            self._scheduler.stats,
            prompt_tokens=self._publisher.num_prompt_tokens,
            generation_tokens=self._publisher.num_generation_tokens,
            steps=self._num_steps,
            requests_finished=dict(self._publisher.finished_counts),
        )

    async def render_metrics(self) -> bytes:
        """All that is counted and measured, in Prometheus' text format. Raises as `stats`."""
        stats = self.stats()
        self.metrics.observe_stats(stats)
        return self.metrics.render()

    # ------------------------------------------------------------ inside

    async def _admit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        grammar: GrammarStart | None,
    ) -> RequestState:
        request_id = self._check_open(request_id)
        _check_name("cache_salt", cache_salt or "")
        self._check_generates()
        text: str | None = None
        if isinstance(prompt, str):
            limit = self._admission.token_limit(params, "prompt")
            text, [token_ids] = prompt, await self.tokenize_texts([prompt], limit=limit)
        else:
            token_ids = self._admission.token_ids(prompt, params)
        bad_words: BadWords = ()
        if params.bad_words:
            bad_words = await self._bad_words(params)
        self._check_open(request_id)  # Others may have come meanwhile, or the end.
        requests = self._admission.requests(
            request_id,
            token_ids,
            params,
            priority=priority,
            cache_salt=cache_salt,
            grammar=grammar,
            bad_words=bad_words,
        )
        state = RequestState(request_id, text, requests, requests[0].params, self.tokenizer)
        await self._begin(state)
        return state

    async def _bad_words(self, params: SamplingParams) -> BadWords:
        """Their token ids. Raises InvalidRequest without a tokenizer."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidRequest("bad_words: needs a tokenizer", param="bad_words")
        if len(params.bad_words) <= FEW_WORDS:
            return tokenizer.bad_words_ids(params.bad_words)
        size = sum(map(len, params.bad_words))
        return await self._text_threads.run(size, lambda: tokenizer.bad_words_ids(params.bad_words))

    async def _admit_pooling(
        self,
        prompt: PreparedPrompt,
        params: PoolingParams,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
    ) -> PoolingState:
        request_id = self._check_open(request_id)
        _check_name("cache_salt", cache_salt or "")
        assert self._pooling_admission is not None
        request = self._pooling_admission.request(
            request_id, prompt, params, priority=priority, cache_salt=cache_salt
        )
        state = PoolingState(prompt.text, request)
        await self._begin(state)
        return state

    async def _begin(self, state: State) -> None:
        """Checked, and known to nobody yet: now it is under way."""
        self._enter(state)

    def _enter(self, state: State) -> None:
        self._publisher.enter(state)
        self._steps.wake()

    def _abort(self, state: State) -> None:
        """End what is left of a request, at once: its blocks are free when this returns."""
        self._publisher.abort(state)
        self._steps.wake()

    def _check_open(self, request_id: str | None) -> str:
        """→ the id to use. Raises EngineStopped, EngineOverloaded, InvalidRequest."""
        self._check_running()
        self._check_room()
        request_id = request_id or uuid.uuid4().hex
        _check_name("request_id", request_id)
        self._underway.check_free(request_id)
        return request_id

    def _check_running(self) -> None:
        """Raises EngineStopped."""
        if self.dead_reason is not None:
            raise EngineStopped(f"the engine died: {self.dead_reason}")
        self._check_started()
        if not self._accepting:
            raise EngineStopped("the engine is not accepting requests: it is stopping or stopped")

    def _check_started(self) -> None:
        """Raises EngineStopped."""
        if not hasattr(self, "_grammars"):
            raise EngineStopped("the engine has not started, which `async with` or start() does")

    def _sampling(self, params: SamplingParams | None) -> SamplingParams:
        """As given, or the model's defaults. Raises InvalidRequest for what is neither."""
        if not isinstance(params, SamplingParams | None):
            kind = type(params).__name__
            raise InvalidRequest(f"params: must be SamplingParams, got {kind}", param="params")
        return self.model_config.sampling.params() if params is None else params

    def _check_room(self) -> None:
        limit = self.config.max_waiting_requests
        if limit is not None and self._scheduler.num_waiting >= limit:
            raise EngineOverloaded(f"{limit} requests are waiting already; try again later")

    def _check_generates(self) -> None:
        if self.model_config.pooling is not None:
            raise InvalidRequest(self._wrong_kind("generate"), param="model")

    def _wrong_kind(self, asked: str) -> str:
        """Why this engine does not do what was asked."""
        does = ", ".join(self.supported_tasks)
        if self.model_config.pooling is None:
            return (
                f"{asked}: this model generates text; start it with --runner pooling to have its "
                "hidden states pooled"
            )
        return f"{asked}: this model gives vectors ({does}) and no text"

    def _stepped(self, plan: StepPlan, result: StepResult) -> None:
        self._num_steps += 1
        self.metrics.observe_step(self.stats(), plan.total_tokens, result.device_seconds)
        if self._watch_steps:
            self._spawn(self.plugins.emit("step_finished", plan=plan, result=result))

    def _on_transfers(self) -> None:
        """The KV connector's worker half has something to report: a step will bring it."""
        if hasattr(self, "_steps") and self._scheduler.transfers is not None:
            self._scheduler.transfers.expect_report()
            self._steps.wake()

    def _wake(self) -> None:
        """The KV connector's scheduler half has an answer."""
        if hasattr(self, "_steps"):
            self._steps.wake()

    def _die(self, error: BaseException) -> None:
        """A step failed as a whole: every request ends with an error, and no more are taken."""
        self.dead_reason = f"{type(error).__name__}: {error}"
        self._accepting = False
        logger.error("the engine died", exc_info=error)
        self._publisher.publish(self._scheduler.fail_all(f"the engine died: {self.dead_reason}"))

    def _request_finished(self, output: RequestOutput | PoolingRequestOutput) -> None:
        self._spawn(self.plugins.emit("request_finished", output=output))

    async def _listeners_done(self) -> None:
        await asyncio.gather(*self._background, return_exceptions=True)

    def _spawn(self, awaitable: Any) -> None:
        task = asyncio.ensure_future(awaitable)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
