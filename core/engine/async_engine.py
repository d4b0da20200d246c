"""`AsyncEngine`: the engine inside an asyncio program.

async with AsyncEngine(EngineConfig(model="path")) as engine:
    async for output in engine.generate("Once", SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import prometheus_client as prometheus

from ..adapters.adapter_calls import AdapterCalls
from ..config import EngineConfig
from ..errors import EngineStopped
from ..inputs import ChatMessage, Prompt
from ..live.engine_jobs import LiveJob, ResetPrefixCache
from ..live.live_calls import LiveCalls
from ..loading.model_config import ModelConfig
from ..lora_request import AdapterCard, AdapterJob, ListAdapters
from ..make_core import make_core
from ..metrics.plugin_metrics import add_plugin_metrics
from ..outputs import EngineStats, RequestOutput
from ..pooling_params import PoolingParams
from ..protocols.executors import ExecutorInfo
from ..registry import Plugins, load_plugins
from ..sampling_params import SamplingParams
from ..text.token_limit import TokenLimit
from ..text.tokenizer import Tokenizer
from .core import logged
from .core_client import HEALTH_SECONDS, CoreClient
from .input_session import StreamingInput, session_outputs
from .output_stream import OutputStream
from .plugin_events import PluginEvents
from .pooling import PoolingPrompt, PoolingState, PoolingStream
from .request_entry import RequestEntry
from .request_options import ChatRequestOptions, Envelope, RequestOptions
from .request_state import RequestState
from .text_processor import ChatOptions, TextProcessor

T = TypeVar("T")
NOT_STARTED = "the engine has not started, which `async with` or start() does"
MAX_TOKENIZED = 1 << 17
"""Most tokens of a text only tokenized, or four times the context."""


class AsyncEngine(AdapterCalls, LiveCalls):
    """Serves requests with a core, by default one in this process.

    Use as an async context manager, or call `start` and `stop`. All methods belong to the event
    loop that started it. Many engines may live in one process.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        plugins: Plugins | None = None,
        core: CoreClient | None = None,
    ) -> None:
        """plugins: instead of all installed ones. core: instead of the one that `config` asks
        for."""
        if plugins is None:
            plugins = load_plugins(disable=config.disable_plugins)
        plugins.configure(config.plugin_options)
        self.plugins = plugins
        self.core: CoreClient = make_core(config, plugins) if core is None else core
        self._texts = TextProcessor()
        self._events = PluginEvents(plugins)
        self._entry: RequestEntry | None = None
        """None before the start."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the start."""

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Load the model and begin to serve. Raises ConfigError, LoadError, OutOfMemory."""
        if self._loop is not None:
            raise EngineStopped("this engine was started before; create a new one")
        self._loop = asyncio.get_running_loop()
        core = self.core
        await core.start(self._texts, self._events)
        try:
            add_plugin_metrics(self.plugins, core.registry, self)
            self._entry = RequestEntry(core, self._texts, self.plugins)
            await self._entry.start()
        except BaseException:
            await core.stop()
            raise
        core.requests.accepting = core.requests.dead_reason is None
        if core.in_process:
            await self.plugins.emit("engine_started", engine=self)

    async def drain(self, timeout: float | None = None) -> bool:
        """Accept no new requests, and wait for the live ones, at most `timeout` seconds.

        Return whether all of them finished.
        """
        self.core.requests.accepting = False
        try:
            await asyncio.wait_for(self.core.requests.idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Abort what is running and free the device. Safe to call twice.

        An error while a part stops is logged, and the other parts still stop.
        """
        self._check_loop()
        self.core.requests.accepting = False
        if self._entry is not None:
            for state in list(self.core.requests.states.values()):
                with logged(f"aborting request {state.request_id}"):
                    self.core.abort_request(state)
            await self._events.settled()
            if self.core.in_process:
                await self.plugins.emit("engine_stopping", engine=self)
        await self.core.stop()
        if self._entry is not None:
            self._entry.close()
        self._texts.close()
        await self._events.settled()

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
        **options: Unpack[RequestOptions],
    ) -> OutputStream:
        """Complete `prompt` (text, token ids or `{"prompt_token_ids": [...]}`).

        Without `params`, the checkpoint's defaults apply (`model_config.sampling`).
        options: see `RequestOptions`.

        Return an async iterator of RequestOutput. Its first step raises InvalidRequest (with the
        field's name), EngineOverloaded or EngineStopped.
        """
        envelope = Envelope.of(**options)

        async def start() -> RequestState:
            return await self._entry_here().complete(prompt, params, envelope)

        return OutputStream(start, self.core.abort_request)

    def session(
        self,
        inputs: AsyncIterable[StreamingInput],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Append inputs to one prompt as they come, and yield the outputs that follow each.

        An input waits until the output before it has finished; that output, but for its last token,
        is then part of the prompt, whose tokens are cached (`enable_prefix_caching`). The
        iteration ends with the inputs, and leaving it aborts the request that runs. options: see
        `RequestOptions`.
        """
        Envelope.of(**options)  # Now, not with the first input.
        return session_outputs(self, inputs, params, options)

    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None = None,
        *,
        prediction: str | None = None,
        **options: Unpack[ChatRequestOptions],
    ) -> OutputStream:
        """Complete OpenAI-style messages through the model's chat template, or `chat_template`.

        prediction: what the output is expected to be. The output is the same; it comes in fewer
        steps if the engine's speculator uses it. options: see `RequestOptions` and `ChatOptions`.
        """
        envelope, rendering = Envelope.split(options)

        async def start() -> RequestState:
            return await self._entry_here().chat(
                messages, params, envelope, prediction, **rendering
            )

        return OutputStream(start, self.core.abort_request)

    def encode(
        self,
        prompt: PoolingPrompt,
        params: PoolingParams | None = None,
        *,
        add_special_tokens: bool = True,
        **options: Unpack[RequestOptions],
    ) -> PoolingStream:
        """Compute a vector for `prompt`: text, token ids, or a pair of texts for a cross-encoder.

        options: see `RequestOptions`.

        Await the result for the PoolingRequestOutput, or iterate over the one output. Raises
        InvalidRequest (with the field's name), EngineOverloaded, EngineStopped, and RequestFailed
        if the request alone fails or is aborted.
        """
        envelope = Envelope.of(**options)

        async def start() -> PoolingState:
            entry = self._entry_here()
            return await entry.encode(prompt, params, envelope, add_special_tokens)

        return PoolingStream(start, self.core.abort_request)

    async def abort(self, request_id: str) -> bool:
        """End a request; its stream gets a last output with finish_reason "abort".

        Return whether there was such a request.
        """
        state = self.core.requests.states.get(request_id)
        if state is not None:
            self.core.abort_request(state)
        return state is not None

    # ------------------------------------------------------------ adapters and live operation

    async def ask_adapters(self, job: AdapterJob) -> list[AdapterCard]:
        self._started_entry()
        if isinstance(job, ListAdapters) and not self.config.enable_lora:
            return []
        return await self.core.ask_adapters(job)

    async def ask_live(self, job: LiveJob) -> dict[str, Any]:
        self._started_entry()
        return await self.core.ask_live(job)

    # ------------------------------------------------------------ texts

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None before the start, and with `skip_tokenizer_init`."""
        return self._texts.tokenizer

    @property
    def chat_template_variables(self) -> frozenset[str]:
        """Names that `chat_template_kwargs` may set: variables that the model's chat template reads
        besides messages and tools."""
        return self._texts.chat_template_variables

    @property
    def template_joins_pairs(self) -> bool:
        """Whether the chat template joins two texts that are scored: it reads the roles `query` and
        `document`."""
        return self._texts.joins_pairs

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        limit: TokenLimit | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """Return the prompt's token ids, as `chat` would send those of texts. Blocks; see
        `tokenize_chat`.

        limit: how many tokens, and what happens to more; None: as `tokenize_limit`.
        """
        limit = limit or self.tokenize_limit("messages")
        return self._texts.render_chat(messages, limit, **options)

    async def tokenize_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        limit: TokenLimit | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """Run `render_chat` on a thread for texts, and count media. Raises EngineOverloaded if too
        many wait."""
        limit = limit or self.tokenize_limit("messages")
        return await self._started_entry().tokenize_chat(messages, limit, **options)

    def prompt_end(self, chat_template_kwargs: Mapping[str, Any] | None = None) -> str:
        """Return what the model's chat template writes last before a response, "" if unknown."""
        return self._texts.prompt_end(chat_template_kwargs)

    async def tokenize_texts(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        limit: TokenLimit | None = None,
    ) -> list[list[int]]:
        """Return the token ids of each text; long ones are encoded on a thread for texts.

        limit: of each text; None: as `tokenize_limit`. Raises what the limit says, and
        EngineOverloaded if too many texts wait.
        """
        limit = limit or self.tokenize_limit("prompt")
        return await self._texts.tokenize(texts, limit, add_special_tokens=add_special_tokens)

    def prompt_limit(self, params: SamplingParams, param: str = "prompt") -> TokenLimit:
        """Return how much of the text of a prompt with these parameters is tokenized."""
        return self._started_entry().admission.token_limit(params, param)

    def check_num_logprobs(self, prompt_lengths: Sequence[int], params: SamplingParams) -> None:
        """Raise InvalidRequest if prompts with these numbers of tokens, which one caller sends
        together, would get more log-probabilities than `max_logprobs_per_request`."""
        self._started_entry().admission.check_num_logprobs(prompt_lengths, params)

    def limit_logprobs(self, most: int | None) -> None:
        """Refuse requests, with EngineOverloaded, while running ones may get so many
        log-probabilities that there would be more than `most` in all; one alone is served. None: no
        limit."""
        self.core.requests.most_logprobs = most

    def tokenize_limit(self, param: str) -> TokenLimit:
        """Return how much of a text is tokenized without a request: more than the context holds."""
        context = self.model_config.max_model_len
        return TokenLimit(tokens=max(MAX_TOKENIZED, 4 * context), context=context, param=param)

    async def in_text_threads(self, size: int, work: Callable[[], T]) -> T:
        """Run other work on a text of `size` characters. Raises EngineOverloaded, as above."""
        return await self._texts.run(size, work)

    # ------------------------------------------------------------ state

    @property
    def config(self) -> EngineConfig:
        """Resolved at start: `device` and `max_num_batched_tokens` are concrete."""
        return self.core.config

    @property
    def model_config(self) -> ModelConfig:
        """Raises EngineStopped before it is known, early in the start."""
        with self._known_once_started():
            return self.core.model_config

    @property
    def info(self) -> ExecutorInfo:
        """Raises EngineStopped before it is known, during the start."""
        with self._known_once_started():
            return self.core.info

    @property
    def metrics_registry(self) -> prometheus.CollectorRegistry:
        """The metrics of this process. Raises EngineStopped before the start."""
        with self._known_once_started():
            return self.core.registry

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Tasks of this engine: ("generate",), or those of PoolingParams, its default first."""
        pooling = self.model_config.pooling
        return ("generate",) if pooling is None else pooling.tasks

    @property
    def healthy(self) -> bool:
        """Whether requests are accepted: started, neither draining nor stopped, and alive."""
        return self.core.requests.healthy

    @property
    def dead_reason(self) -> str | None:
        """Why no request can be served any more."""
        return self.core.requests.dead_reason

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The names that requests may use; responses have the first one."""
        return self.config.served_names

    async def check_health(self, timeout: float = HEALTH_SECONDS) -> dict[str, str]:
        """Raise EngineStopped unless the step loop and the worker are alive.

        A worker that has not replied within `timeout` seconds is at fault only if no step ended
        meanwhile. With `data_parallel_size`, one member that serves is enough; return why others
        do not, by their names.
        """
        return await self.core.check_health(timeout)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached blocks. Return False if some are in use. Raises as `stats`.

        reset_running_requests: compute running requests again, so that none is in use.
        """
        self._started_entry()
        if reset_running_requests:
            job = ResetPrefixCache(reset_running_requests=True)
            return bool((await self.core.ask_live(job))["success"])
        return await self.core.reset_prefix_cache()

    async def compact_kv_cache(self) -> int:
        """Compact the caches of running requests with their next steps, as after a prompt, where
        blocks come back by it. Return how many are to be. Raises InvalidRequest without
        `kv_compression`, and as `stats`."""
        self._started_entry()
        return await self.core.compact_kv_cache()

    async def start_profile(self) -> None:
        """Trace the step loop, the worker and the device into `profiler_config`'s folder, until
        `stop_profile` or a bound of it. Raises InvalidRequest without a folder, or while one runs.
        """
        self._started_entry()
        await self.core.start_profile()

    async def stop_profile(self) -> list[str]:
        """Return the paths of the traces, one per engine. Raises InvalidRequest without a profile,
        RequestFailed if one cannot be written."""
        self._started_entry()
        return await self.core.stop_profile()

    def stats(self) -> EngineStats:
        """Return a snapshot, cheap to take. Raises EngineStopped before start."""
        self._started_entry()
        return self.core.stats()

    async def render_metrics(self) -> bytes:
        """Return all metrics in Prometheus' text format. Raises as `stats`."""
        self._started_entry()
        return await self.core.render_metrics()

    def _started_entry(self) -> RequestEntry:
        """Return the entry. Raises EngineStopped before the start."""
        if self._entry is None:
            raise EngineStopped(NOT_STARTED)
        return self._entry

    def _entry_here(self) -> RequestEntry:
        """Return the entry, on the right event loop. Raises EngineStopped before the start,
        RuntimeError on another loop.
        """
        entry = self._started_entry()
        self._check_loop()
        return entry

    def _check_loop(self) -> None:
        """Raise RuntimeError on another event loop than the start's, where requests never wake."""
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise RuntimeError(
                "this engine belongs to the event loop that started it: start and use it in one "
                "asyncio.run, and from other threads through asyncio.run_coroutine_threadsafe"
            )

    @contextlib.contextmanager
    def _known_once_started(self) -> Iterator[None]:
        """Raise EngineStopped for attributes that the core lacks before the start."""
        try:
            yield
        except AttributeError:
            if self._entry is not None:
                raise
            raise EngineStopped(NOT_STARTED) from None
