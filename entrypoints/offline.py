"""`LLM`: the synchronous face, for scripts and notebooks.

with LLM("path") as llm:
    outputs = llm.generate(["Hello", "Once"], SamplingParams(max_tokens=16))

with LLM("path/to/encoder") as llm:
    vectors = [output.outputs.embedding for output in llm.embed(["Hello", "Once"])]
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

import msgspec

from ..core.config import EngineConfig
from ..core.engine.async_engine import AsyncEngine
from ..core.engine.output_stream import OutputStream
from ..core.engine.pooling import PoolingPrompt
from ..core.errors import InvalidRequest
from ..core.inputs import ChatMessage, Prompt, text_and_tokens
from ..core.loading.model_config import ModelConfig
from ..core.lora_request import LoRARequest
from ..core.metrics.reader import Metric, read_metrics
from ..core.outputs import EngineStats, PoolingRequestOutput, RequestOutput
from ..core.pooling_params import PoolingParams, PoolingTask
from ..core.sampling_params import OutputKind, SamplingParams
from .beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from .models.names import find_model
from .prompt_lists import check_list, for_each, listed
from .scoring import Scored, score_all, scored_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ..core.live.weight_update import Weights

T = TypeVar("T")
ADAPTER = (LoRARequest, type(None))
"""Types of an adapter for one prompt, or for all."""


class PoolingOptions(TypedDict, total=False):
    """Options of `LLM.encode` that its forms for one task have, too."""

    truncate_prompt_tokens: int | None
    use_tqdm: bool
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """An engine on an event loop of its own, in a thread of its own."""

    def __init__(self, model: str = "", **options: Any) -> None:
        """model: as for `jackfield serve`. options: fields of EngineConfig.

        Raises ConfigError, LoadError, OutOfMemory.
        """
        named = find_model(model, options.get("download_dir"))
        config = EngineConfig.from_options({"model": named.model, **options})
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="jackfield-loop", daemon=True
        )
        self._thread.start()
        self.engine = AsyncEngine(config)
        self._process = os.getpid()
        self._end = weakref.finalize(
            self, _shut, self.engine, self._loop, self._thread, self._process
        )
        self._end.atexit = False  # At exit it would run after the threads that it needs have ended.
        getattr(threading, "_register_atexit", atexit.register)(self._end)
        try:
            self._run(self.engine.start())
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt (text, token ids, or a dict with `prompt` or `prompt_token_ids`) or a
        list; return outputs in the same order. sampling_params, lora_request: one for all, or one
        for each; priority: of each, lower goes first (`scheduling_policy`)."""
        items = listed(prompts)
        priorities = for_each("priority", priority or 0, int, items)

        def start(item: Any, params: SamplingParams, lora: LoRARequest | None) -> OutputStream:
            prompt, place = item
            cache_salt = None
            if isinstance(prompt, Mapping) and "cache_salt" in prompt:  # Beside vLLM's prompts.
                prompt = dict(prompt)
                cache_salt = prompt.pop("cache_salt")
            return self.engine.generate(
                prompt,
                params,
                priority=place,
                cache_salt=cache_salt,
                lora_request=lora,
            )

        with_places = list(zip(items, priorities, strict=True))
        return self._all(with_places, sampling_params, lora_request, start, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Return the most likely outputs that a search finds for each prompt (text, token ids, or a
        dict with `prompt` or `prompt_token_ids`), the best first."""
        items = listed(prompts)
        loras = for_each("lora_request", lora_request, ADAPTER, items)

        async def search(prompt: Any, lora: LoRARequest | None) -> BeamSearchOutput:
            text, token_ids = text_and_tokens(prompt)
            if token_ids is None:
                [token_ids] = await self.engine.tokenize_texts([text or ""])
            options = {"lora_request": lora}
            shown = SamplingParams(logprobs=0)
            searching = BeamSearch(self.engine, text, token_ids, params, shown, options)
            return BeamSearchOutput.of(await anext(searching.outputs()))

        return self._run(_collect(map(search, items, loras), use_tqdm))

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a copy of the model's tokenizer as a class of transformers, with its chat
        template. Raises InvalidRequest without a tokenizer (`skip_tokenizer_init`)."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer (skip_tokenizer_init)")
        import transformers
        from tokenizers import Tokenizer as Backend

        create: Any = transformers.PreTrainedTokenizerFast  # Untyped.
        wrapped: PreTrainedTokenizerFast = create(
            tokenizer_object=Backend.from_str(tokenizer.backend.to_str()),
            chat_template=tokenizer.chat_templates or None,
            **tokenizer.special_tokens,
        )
        return wrapped

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters used without `params`: the model's own defaults."""
        return self.engine.model_config.sampling.params()

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Respond to one conversation or a list of them; return outputs in the same order."""
        check_list("messages", messages)
        single = len(messages) > 0 and isinstance(messages[0], Mapping)
        items: list[Any] = [messages] if single else list(messages)

        def start(
            conversation: Any, params: SamplingParams, lora: LoRARequest | None
        ) -> OutputStream:
            return self.engine.chat(
                conversation,
                params,
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                mm_processor_kwargs=mm_processor_kwargs,
                lora_request=lora,
            )

        return self._all(items, sampling_params, lora_request, start, use_tqdm)

    def encode(
        self,
        prompts: PoolingPrompt | Sequence[PoolingPrompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: PoolingTask | None = None,
    ) -> list[PoolingRequestOutput]:
        """Pool one prompt (text, token ids, a pair of texts) or a list; return outputs in order.

        truncate_prompt_tokens, pooling_task: take the place of these fields of the parameters.
        """
        items = listed(prompts)
        pooling_params = PoolingParams() if pooling_params is None else pooling_params
        each = for_each("pooling_params", pooling_params, PoolingParams, items)
        changes: dict[str, Any] = {
            "truncate_prompt_tokens": truncate_prompt_tokens, "task": pooling_task,
        }  # fmt: skip
        changes = {name: value for name, value in changes.items() if value is not None}
        each = [msgspec.structs.replace(params, **changes) for params in each]
        loras = for_each("lora_request", lora_request, ADAPTER, items)

        async def encode_one(
            prompt: Any, params: PoolingParams, lora: LoRARequest | None
        ) -> PoolingRequestOutput:
            return await self.engine.encode(prompt, params, lora_request=lora)

        return self._run(_collect(map(encode_one, items, each, loras), use_tqdm))

    def embed(
        self,
        prompts: PoolingPrompt | Sequence[PoolingPrompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[PoolingRequestOutput]:
        """Return one vector per prompt: `outputs.embedding` as a list, `outputs.data` as an
        array."""
        return self.encode(prompts, pooling_params, pooling_task="embed", **options)

    def classify(
        self,
        prompts: PoolingPrompt | Sequence[PoolingPrompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[PoolingRequestOutput]:
        """Return one probability per label: `outputs.probs`."""
        return self.encode(prompts, pooling_params, pooling_task="classify", **options)

    def reward(
        self,
        prompts: PoolingPrompt | Sequence[PoolingPrompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[PoolingRequestOutput]:
        """Return the rewards of each token, or of each step: `outputs.data`."""
        return self.encode(prompts, pooling_params, pooling_task="token_classify", **options)

    def score(
        self,
        text_1: Scored,
        text_2: Scored,
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the similarity of texts, `outputs.score`: one text with one, one with many, or
        pairs of two lists. With pictures, a text is {"content": parts of a message}.

        A cross-encoder's score, or the cosine of two embeddings. instruction, chat_template_kwargs:
        for a chat template that joins two texts.
        """
        first, second = scored_texts(text_1, "text_1"), scored_texts(text_2, "text_2")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequest(
                f"text_2: {len(second)} texts for {len(first)} in text_1", param="text_2"
            )
        params = pooling_params or PoolingParams()
        if truncate_prompt_tokens is not None:
            params = msgspec.structs.replace(params, truncate_prompt_tokens=truncate_prompt_tokens)
        instructions = {} if instruction is None else {"instruction": instruction}
        return self._run(
            score_all(
                self.engine,
                list(zip(first, second, strict=True)),
                params,
                template_kwargs={**(chat_template_kwargs or {}), **instructions},
            )
        )

    # ------------------------------------------------------------ state

    @property
    def llm_engine(self) -> AsyncEngine:
        """The engine, under vLLM's name: for its `config`, `model_config` and `tokenizer`. Its
        coroutines run on its own event loop."""
        return self.engine

    @property
    def model_config(self) -> ModelConfig:
        """What the model is, such as `max_model_len`, `vocab_size` and `dtype`."""
        return self.engine.model_config

    def get_metrics(self) -> list[Metric]:
        """Return the metrics of now: `Counter`, `Gauge` and `Histogram` of
        `jackfield.core.metrics.reader`, under the names that /metrics has."""
        return read_metrics(self._run(self.engine.render_metrics()).decode())

    def stats(self) -> EngineStats:
        """Return what the engine counts, as of now."""
        return self.engine.stats()

    def compact_kv_cache(self) -> int:
        """Compact the caches of running requests with their next steps; return how many. Raises
        InvalidRequest without `kv_compression`."""
        return self._run(self.engine.compact_kv_cache())

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; return whether it was done, which it is not while requests
        run."""
        return self._run(self.engine.reset_prefix_cache())

    def start_profile(self) -> None:
        """Trace the step loop, the worker and the device (`profiler_config`)."""
        self._run(self.engine.start_profile())

    def stop_profile(self) -> list[str]:
        """End a profile; return the files that it is in."""
        return list(self._run(self.engine.stop_profile()))

    def update_weights(self, weights: Weights, *, version: str | None = None) -> dict[str, Any]:
        """Serve with other weights from now on, all of them or none: a checkpoint's folder, or its
        tensors, (name, tensor), each once. See `AsyncEngine.update_weights`."""
        return self._run(self.engine.update_weights(weights, version=version))

    @property
    def weights_version(self) -> str:
        """The version of the weights that serve: "default" until the first update."""
        return self._run(self.engine.weights_version())

    def sleep(self, level: int = 1) -> dict[str, Any]:
        """Give the memory of weights and caches back; see `AsyncEngine.sleep`."""
        return self._run(self.engine.sleep(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Take the memory again; see `AsyncEngine.wake_up`."""
        return self._run(self.engine.wake_up(tags))

    def close(self) -> None:
        """Stop the engine and free the device. Safe to call twice. Also runs at the program's end,
        and when the last reference goes."""
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(
        self,
        items: list[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        start: Callable[[Any, SamplingParams, LoRARequest | None], OutputStream],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = self.get_default_sampling_params() if params is None else params
        each = for_each("sampling_params", params, SamplingParams, items)
        each = [msgspec.structs.replace(p, output_kind=OutputKind.FINAL_ONLY) for p in each]
        loras = for_each("lora_request", lora_request, ADAPTER, items)

        async def finish_one(
            item: Any, params: SamplingParams, lora: LoRARequest | None
        ) -> RequestOutput:
            return await anext(start(item, params, lora))

        return self._run(_collect(map(finish_one, items, each, loras), use_tqdm))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._end.alive:
            work.close()
            raise RuntimeError("this LLM is closed")
        if os.getpid() != self._process:
            work.close()
            raise RuntimeError(
                "this LLM belongs to the process that created it: a fork has none of its threads; "
                "create one after the fork"
            )
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _shut(
    engine: AsyncEngine, loop: asyncio.AbstractEventLoop, thread: threading.Thread, process: int
) -> None:
    if os.getpid() != process:
        return  # A fork at its end: the thread that would answer is not there.
    if threading.current_thread() is thread:  # The garbage collector may run this on any thread.
        threading.Thread(target=_shut, args=(engine, loop, thread, process)).start()
        return
    try:
        asyncio.run_coroutine_threadsafe(engine.stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _collect(work: Iterable[Coroutine[Any, Any, T]], use_tqdm: bool) -> list[T]:
    """Return all results in order, with a progress bar; the first error cancels the others."""
    from tqdm import tqdm

    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    with tqdm(total=len(tasks), disable=not use_tqdm, unit="request") as bar:
        for task in tasks:
            task.add_done_callback(lambda _: bar.update())
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
