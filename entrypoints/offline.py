"""`LLM`: the synchronous face, for scripts and notebooks.

with LLM("path") as llm:
    outputs = llm.generate(["Hello", "Once"], SamplingParams(max_tokens=16))
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ..core.config import EngineConfig
from ..core.engine.async_engine import AsyncEngine
from ..core.engine.output import OutputStream
from ..core.errors import InvalidRequest
from ..core.types import ChatMessage, OutputKind, Prompt, RequestOutput, SamplingParams

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
        self._open = True
        self.engine = AsyncEngine(config)
        try:
            self._run(self.engine.start())
        except BaseException:
            self._end_loop()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt (text, token ids) or a list; → outputs in the same order."""
        if isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            items: list[Any] = [prompts]
        else:
            items = list(prompts)

        def start(prompt: Any, one: SamplingParams) -> OutputStream:
            return self.engine.generate(prompt, one)

        return self._all(items, params, start, use_tqdm)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them; → outputs in the same order."""
        if len(messages) > 0 and isinstance(messages[0], Mapping):
            items: list[Any] = [messages]
        else:
            items = list(messages)

        def start(conversation: Any, one: SamplingParams) -> OutputStream:
            return self.engine.chat(
                conversation, one, tools=tools, chat_template_kwargs=chat_template_kwargs
            )

        return self._all(items, params, start, use_tqdm)

    def close(self) -> None:
        """Stop the engine and free the device. Safe to call twice."""
        if self._open:
            self._run(self.engine.stop())
            self._end_loop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(
        self,
        items: list[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        start: Callable[[Any, SamplingParams], OutputStream],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(items)
        else:
            each = list(params)
            if len(each) != len(items):
                raise InvalidRequest(
                    f"params: {len(each)} given for {len(items)} prompts", param="params"
                )
        each = [msgspec.structs.replace(p, output_kind=OutputKind.FINAL_ONLY) for p in each]
        return self._run(self._collect(items, each, start, use_tqdm))

    async def _collect(
        self,
        items: list[Any],
        params: list[SamplingParams],
        start: Callable[[Any, SamplingParams], OutputStream],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        from tqdm import tqdm

        with tqdm(total=len(items), disable=not use_tqdm, unit="request") as bar:

            async def one(item: Any, wanted: SamplingParams) -> RequestOutput:
                output = await anext(start(item, wanted))
                bar.update()
                return output

            tasks = [
                asyncio.ensure_future(one(item, wanted))
                for item, wanted in zip(items, params, strict=True)
            ]
            try:
                return await asyncio.gather(*tasks)
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._open:
            raise RuntimeError("this LLM is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_loop(self) -> None:
        self._open = False
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
