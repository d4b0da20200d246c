"""Speech of any length into text, by a model of chats that is asked to write it down.

Such a model writes no times, so that windows cannot overlap as in `transcriber.py`: a recording
that is longer than one is divided where it is most quiet, and each window is a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ....core.audio.files import Recording
from ....core.engine.async_engine import AsyncEngine
from ....core.protocols.audio import SpeechChat
from ....core.sampling_params import OutputKind, SamplingParams
from ...http.auth.origin import Origin
from ...http.context import new_id, part_id
from ...http.request_log import watched
from .transcriber import SHORTEST

SEARCHED = 3.0
"""Seconds at a window's end in which a quiet place is looked for."""
PAUSE = 0.1
"""Seconds of which the sound is least there."""
MAX_TOKENS = 1024
"""Most tokens of a window's text."""
SPACELESS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u3000-\u30ff\u3400-\u9fff\uff00-\uff65]")
"""Characters of scripts that put no spaces between words."""


@dataclass(frozen=True)
class ChatTask:
    """What is to be done with a recording."""

    chat: SpeechChat
    language: str | None = None
    """ISO 639-1, if the model takes one."""
    translate: bool = False
    before: str = ""
    """Text that comes before."""
    params: SamplingParams = field(default_factory=SamplingParams)


class ChatTranscriber:
    """Transcribes one recording."""

    def __init__(
        self, file: Recording, engine: AsyncEngine, origin: Origin, task: ChatTask
    ) -> None:
        self._file, self._engine, self._origin, self._task = file, engine, origin, task
        self._rate = file.sampling_rate
        self._id, self._count = new_id("trsc"), 0
        self._told = ""
        """What tells the model the language."""
        if task.language is not None:
            name = task.chat.languages[task.language]
            self._told = task.chat.language.replace("{}", name)

    @property
    def seconds(self) -> float:
        """Return the length of what was read so far: of all, once the text has ended."""
        return self._file.num_samples / self._rate

    async def deltas(self) -> AsyncGenerator[str]:
        """Yield the text as it is written. Raises InvalidRequest for a damaged file."""
        most = int(self._task.chat.max_seconds * self._rate)
        start, last_character = 0, ""
        while True:
            # One sample more tells whether this is the last window.
            samples = await asyncio.to_thread(self._file.window, start, most + 1)
            last = len(samples) <= most
            if not last:
                samples = samples[: quiet_place(samples[:most], self._rate)]
            if len(samples) >= SHORTEST * self._rate or (start == 0 and len(samples)):
                async with contextlib.aclosing(self._window(samples)) as texts:
                    opens = bool(last_character)
                    async for text in texts:
                        spaced = opens and not SPACELESS.search(last_character + text[0])
                        yield f" {text}" if spaced else text
                        opens, last_character = False, text[-1]
            if last:
                return
            start += len(samples)

    async def _window(self, samples: np.ndarray) -> AsyncGenerator[str]:
        """Yield the parts of a window's text, of which no space begins or ends the whole."""
        spaces = ""
        opened = False
        async with contextlib.aclosing(self._written(samples)) as pieces:
            async for piece in pieces:
                text = spaces + piece
                if not opened:
                    text = text.lstrip()
                    opened = bool(text)
                shown = text.rstrip()
                spaces = text[len(shown) :]
                if shown:
                    yield shown

    async def _written(self, samples: np.ndarray) -> AsyncGenerator[str]:
        """Yield what the model writes after its marker: all, if it writes none."""
        marker = "" if self._told else self._task.chat.marker
        before = ""
        async with contextlib.aclosing(self._response(samples)) as pieces:
            async for piece in pieces:
                if not marker:
                    yield piece
                    continue
                before += piece
                _, found, text = before.partition(marker)
                if found:
                    marker = before = ""
                    yield text
        yield before

    async def _response(self, samples: np.ndarray) -> AsyncGenerator[str]:
        """Yield the response to one window."""
        self._count += 1
        options = self._origin.engine_options(part_id(self._id, self._count), 0, None)
        params = msgspec.structs.replace(
            self._task.params, max_tokens=MAX_TOKENS, output_kind=OutputKind.DELTA
        )
        audio, chat = (samples, self._rate), self._task.chat
        instruction = chat.translation if self._task.translate else chat.prompt
        if chat.prompt is not None and instruction is not None:
            text = instruction.replace("{}", self._told)
            prompt: Any = {"prompt": text, "multi_modal_data": {"audio": audio}}
            stream = self._engine.generate(prompt, params, **options)
        else:
            stream = self._engine.chat(
                self._messages(audio), params, add_generation_prompt=not self._told,
                continue_final_message=bool(self._told), **options,
            )  # fmt: skip
        async with contextlib.aclosing(watched(stream)) as outputs:
            async for output in outputs:
                completion = output.outputs[0]
                if completion.finish_reason == "error":
                    raise output.failure()
                yield completion.text

    def _messages(self, audio: Any) -> list[dict[str, Any]]:
        task = self._task
        parts: list[dict[str, Any]] = [{"type": "audio", "audio": audio}]
        instruction = task.chat.translation if task.translate else task.chat.instruction
        if instruction:
            parts.append({"type": "text", "text": instruction})
        messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
        if task.before:
            messages.insert(0, {"role": "system", "content": task.before})
        if self._told:
            messages.append({"role": "assistant", "content": self._told})
        return messages


def quiet_place(samples: np.ndarray, rate: int) -> int:
    """Return where a window that is not the last one ends: the middle of the most quiet pause near
    its end."""
    pause = int(PAUSE * rate)
    begin = max(len(samples) - int(SEARCHED * rate), len(samples) // 2)
    energies = np.concatenate([[0.0], np.cumsum(np.square(samples[begin:], dtype=np.float64))])
    if len(energies) <= pause:
        return len(samples)
    return begin + int((energies[pause:] - energies[:-pause]).argmin()) + pause // 2
