"""An engine's encoder-decoder of speech, as `transcriber.py` uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....core.audio.source import make_source
from ....core.engine.async_engine import AsyncEngine
from ....core.protocols.audio import AudioSource, SpeechTokens
from ....core.sampling_params import SamplingParams
from ...http.auth.origin import Origin
from ...http.context import new_id, part_id, tokenizer_of
from ...http.request_log import watched
from .transcriber import Heard


class EngineDecoder:
    """An engine's model of speech, for one request."""

    def __init__(
        self, engine: AsyncEngine, audio: AudioSource, tokens: SpeechTokens, origin: Origin
    ) -> None:
        self._engine, self._audio, self._tokens = engine, audio, tokens
        self._origin = origin
        self._tokenizer = tokenizer_of(engine)
        self._id, self._count = new_id("trsc"), 0

    async def listen(self, samples: np.ndarray) -> Any:
        """Return a source, made once for several prompts."""
        return await asyncio.to_thread(make_source, self._audio, {"audio": samples})

    async def write(
        self, window: Any, prompt_token_ids: list[int], params: SamplingParams
    ) -> Heard:
        """Run a request of its own."""
        self._count += 1
        options = self._origin.engine_options(part_id(self._id, self._count), 0, None)
        prompt: Any = {
            "prompt_token_ids": prompt_token_ids, "multi_modal_data": {"audio": window}
        }  # fmt: skip
        outputs = watched(self._engine.generate(prompt, params, **options))
        async for output in outputs:
            last = output
        if (completion := last.outputs[0]).finish_reason == "error":
            raise last.failure()
        logprobs = [
            position[token].logprob
            for token, position in zip(
                completion.token_ids, completion.logprobs or (), strict=False
            )
            if position is not None
        ]
        return Heard(completion.token_ids, logprobs)

    async def attention(self, window: Any, token_ids: Sequence[int]) -> np.ndarray:
        heads = self._tokens.alignment_heads
        args = (window.features.data, list(token_ids), [list(head) for head in heads])
        [data, *_] = await self._engine.collective_rpc("source_weights", args=args)
        weights = np.frombuffer(data, dtype=np.float32)
        return weights.reshape(len(heads), len(token_ids), -1)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)
