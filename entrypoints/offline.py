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
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..core.config import EngineConfig
from ..core.engine.async_engine import AsyncEngine
from ..core.engine.output_stream import OutputStream
from ..core.engine.pooling import PoolingPrompt
from ..core.errors import InvalidRequest
from ..core.inputs import ChatMessage, Prompt
from ..core.lora_request import LoRARequest
from ..core.outputs import PoolingRequestOutput, RequestOutput
from ..core.pooling_params import PoolingParams, PoolingTask
from ..core.sampling_params import OutputKind, SamplingParams
from .scoring import score_all

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")


class LLM:
    """An engine on an event loop of its own, in a thread of its own."""

    def __init__(self, model: str = "", **options: Any) -> None:
        """`options`: fields of EngineConfig. Raises ConfigError, LoadError, OutOfMemory."""
        config = EngineConfig.from_options({"model": model, **options})
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
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt (text, token ids, or a dict with `prompt` or `prompt_token_ids`) or a
        list; return outputs in the same order. lora_request: one for all, or one for each."""

        def start(prompt: Any, params: SamplingParams, lora: LoRARequest | None) -> OutputStream:
            cache_salt = None
            if isinstance(prompt, Mapping) and "cache_salt" in prompt:  # Beside vLLM's prompts.
                prompt = dict(prompt)
                cache_salt = prompt.pop("cache_salt")
            return self.engine.generate(prompt, params, cache_salt=cache_salt, lora_request=lora)

        return self._all(_listed(prompts), params, lora_request, start, use_tqdm)

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
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Respond to one conversation or a list of them; return outputs in the same order."""
        _check_many("messages", messages)
        single = len(messages) > 0 and isinstance(messages[0], Mapping)
        items: list[Any] = [messages] if single else list(messages)

        def start(
            conversation: Any, params: SamplingParams, lora: LoRARequest | None
        ) -> OutputStream:
            return self.engine.chat(
                conversation,
                params,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                lora_request=lora,
            )

        return self._all(items, params, lora_request, start, use_tqdm)

    def encode(
        self,
        prompts: PoolingPrompt | Sequence[PoolingPrompt],
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Pool one prompt (text, token ids, a pair of texts) or a list; return outputs in order."""
        items = _listed(prompts)
        if params is None or isinstance(params, PoolingParams):
            each = [params or PoolingParams()] * len(items)
        else:
            each = list(params)
        _check_as_many(each, items)
        loras = _for_each(lora_request, items)

        async def encode_one(
            prompt: Any, params: PoolingParams, lora: LoRARequest | None
        ) -> PoolingRequestOutput:
            return await self.engine.encode(prompt, params, lora_request=lora)

        return self._run(_collect(map(encode_one, items, each, loras), use_tqdm))

    def embed(
        self,
        prompts: PoolingPrompt | Sequence[PoolingPrompt],
        params: PoolingParams | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Return one vector per prompt: `outputs.embedding` as a list, `outputs.data` as an
        array."""
        return self.encode(
            prompts, _for_task("embed", params), lora_request=lora_request, use_tqdm=use_tqdm
        )

    def classify(
        self,
        prompts: PoolingPrompt | Sequence[PoolingPrompt],
        params: PoolingParams | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Return one probability per label: `outputs.probs`."""
        return self.encode(
            prompts, _for_task("classify", params), lora_request=lora_request, use_tqdm=use_tqdm
        )

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        params: PoolingParams | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the similarity of texts, `outputs.score`: one text with one, one with many, or
        pairs of two lists.

        A cross-encoder's score, or the cosine of two embeddings.
        """
        first = [text_1] if isinstance(text_1, str) else list(text_1)
        second = [text_2] if isinstance(text_2, str) else list(text_2)
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequest(
                f"text_2: {len(second)} texts for {len(first)} in text_1", param="text_2"
            )
        return self._run(score_all(self.engine, list(zip(first, second, strict=True)), params))

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
        if params is None or isinstance(params, SamplingParams):
            each = [params or self.get_default_sampling_params()] * len(items)
        else:
            each = list(params)
        _check_as_many(each, items)
        each = [msgspec.structs.replace(p, output_kind=OutputKind.FINAL_ONLY) for p in each]

        loras = _for_each(lora_request, items)

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


def _listed(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    _check_many("prompts", prompts)
    if len(prompts) > 0 and isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


def _check_many(name: str, value: Any) -> None:
    """Raise InvalidRequest unless the value is a sequence or array."""
    places = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if not places or isinstance(value, str | bytes | Mapping):
        raise InvalidRequest(f"{name}: must be a list, got {type(value).__name__}", param=name)


def _check_as_many(params: list[Any], prompts: list[Any]) -> None:
    if len(params) != len(prompts):
        raise InvalidRequest(
            f"params: {len(params)} given for {len(prompts)} prompts", param="params"
        )


def _for_each(
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None, items: list[Any]
) -> list[LoRARequest | None]:
    """Return the adapter of each prompt. Raises InvalidRequest for another number of them."""
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return [lora_request] * len(items)
    _check_many("lora_request", lora_request)
    if len(lora_request) != len(items):
        raise InvalidRequest(
            f"lora_request: {len(lora_request)} given for {len(items)} prompts",
            param="lora_request",
        )
    return list(lora_request)


def _for_task(task: PoolingTask, params: PoolingParams | None) -> PoolingParams:
    return msgspec.structs.replace(params or PoolingParams(), task=task)
