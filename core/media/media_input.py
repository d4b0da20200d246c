"""Media of prompts, from their sources to items: read, decode, process, place."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

from ..config import EngineConfig
from ..errors import ConfigError, EngineOverloaded, InvalidRequest
from ..loading.model_config import MediaConfig, ModelConfig
from ..parts.media import MediaContent, MediaItem
from ..protocols.media import ArrangesPrompts, MediaModel, MediaSetup
from ..registry import Plugins
from ..text.chat_template import Placeholder
from ..text.tokenizer import Tokenizer
from .fetch import LARGE, MediaFetcher
from .readers import READERS, Reader
from .sources import OPTIONS_FIELD, MediaSource

MAX_THREADS = 8
"""That decode and process, and as many as half the cores; so many decoded items are in memory at
once."""
MAX_WAITING_BYTES = 256 << 20
"""Most bytes of encoded items that wait for a thread; beyond, requests are refused (503)."""
MAX_BYTES = 4 << 30
"""Most bytes of processed items in unfinished requests; likewise."""
MAX_LOWERED = 8
"""Most processors with options of requests that are kept."""
CACHE_BYTES = 256 << 20
"""Of processed items that are kept for later requests."""


class MediaInput:
    """Makes items of a prompt's media; one per engine, or front end."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        media: MediaConfig,
        plugins: Plugins,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.modalities = media.modalities
        self._whole_spans = media.spans is not None
        self._most_tokens = config.max_num_batched_tokens
        self._limits = {each: config.media_limit(each) for each in media.modalities}
        self._plugins, self._name = plugins, media.architecture
        self._setup = MediaSetup(
            model_config.path,
            model_config.whole_config,
            config.mm_processor_kwargs or {},
            None if tokenizer is None else functools.partial(_tokens, tokenizer),
        )
        self._io_options = config.media_io_kwargs or {}
        self._tokenizer = tokenizer
        self._fetcher = MediaFetcher(config.allowed_local_media_path, config.allowed_media_domains)
        threads = max(2, min(MAX_THREADS, (os.cpu_count() or 2) // 2))
        self._threads = ThreadPoolExecutor(threads, "jackfield-media")
        self._readers: Mapping[str, Reader] = {}
        """By modality, once started."""
        self._lowered: dict[tuple[str, str], Reader] = {}
        """By modality and options of requests, the oldest first."""
        self._waiting_bytes = 0
        self._live_bytes = 0
        self._freed: deque[int] = deque()
        """Bytes of items that are no longer in use; appended by any thread."""
        self._kept: OrderedDict[bytes, MediaContent] = OrderedDict()
        """Hash of what was sent → the item."""
        self._kept_bytes = 0
        self._making: dict[bytes, asyncio.Future[MediaContent]] = {}
        """Likewise, while it is made: once for all who wait."""

    async def start(self) -> dict[str, Placeholder]:
        """Create the processors; return what stands for items in texts. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        self._readers = await loop.run_in_executor(self._threads, self._make)
        tokenizer = self._tokenizer
        if tokenizer is None:
            return {}
        placeholders = {}
        for modality, reader in self._readers.items():
            processor = reader.processor
            text = tokenizer.backend.id_to_token(processor.placeholder_id)
            if text is None:
                raise ConfigError(
                    f"model: its tokenizer has no token {processor.placeholder_id}, which stands "
                    f"for {reader.noun}s",
                    param="model",
                )
            placeholders[modality] = Placeholder(text, *processor.around)
        return placeholders

    def _make(self) -> dict[str, Reader]:
        registry = self._plugins["media_model"]
        kind: type[MediaModel] = registry.load(self._name)
        with registry.calling(self._name, "processor"):
            return {
                modality: READERS[modality](
                    kind.processor(self._setup, modality), self._io_options.get(modality, {})
                )
                for modality in self.modalities
            }

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ items

    async def contents(self, sources: Sequence[MediaSource]) -> list[MediaContent]:
        """Read and process items. Raises InvalidRequest with the field of one that is at fault, and
        EngineOverloaded."""
        for modality, limit in self._limits.items():
            own = [source for source in sources if source.modality == modality]
            if len(own) > limit:
                raise InvalidRequest(
                    f"{own[limit].field}: at most {limit} of {modality} per prompt "
                    "(limit_mm_per_prompt)",
                    param=own[limit].field,
                )
        tasks = [asyncio.ensure_future(self._content(source)) for source in sources]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _content(self, source: MediaSource) -> MediaContent:
        value, (modality, _, field, detail, options) = source.value, source
        if isinstance(value, str):
            value = await self._fetcher.read(value, field, modality)
        read = functools.partial(self._read, modality, value, field, detail, options)
        if not isinstance(value, bytes | bytearray | memoryview):
            return await self._on_thread(0, read)
        key = await self._hashed(value, modality, detail, options)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        if (making := self._making.get(key)) is None:
            work = self._on_thread(len(value), read)
            making = self._making[key] = asyncio.ensure_future(work)
            making.add_done_callback(functools.partial(self._made, key))
        try:
            # Who goes away does not take it from others who wait.
            return await asyncio.shield(making)
        except InvalidRequest as error:
            name = error.param or ""
            if name == OPTIONS_FIELD:
                raise
            # The error may name the field of another request that sent the same.
            raise InvalidRequest(str(error).replace(name, field, 1), param=field) from None

    async def _hashed(
        self, value: bytes | bytearray | memoryview, modality: str, detail: str, options: str
    ) -> bytes:
        """Return the key of what was sent."""

        def key() -> bytes:
            hasher = blake2b(value, digest_size=32, person=modality.encode(), salt=detail.encode())
            # What was sent has a length of its own, so that nothing else ends like this.
            hasher.update(f"{len(value)} {options}".encode())
            return hasher.digest()

        return key() if len(value) < LARGE else await asyncio.to_thread(key)

    def _made(self, key: bytes, made: asyncio.Future[MediaContent]) -> None:
        del self._making[key]
        if made.cancelled() or made.exception() is not None:
            return
        content = made.result()
        self._kept[key] = content
        self._kept_bytes += content.nbytes
        while self._kept_bytes > CACHE_BYTES:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes

    async def _on_thread(self, size: int, work: Any) -> MediaContent:
        if self._waiting_bytes and self._waiting_bytes + size > MAX_WAITING_BYTES:
            raise EngineOverloaded("too many items wait to be decoded; try again later")
        while self._freed:
            self._live_bytes -= self._freed.popleft()
        if self._live_bytes > MAX_BYTES:
            raise EngineOverloaded(
                f"unfinished requests have {self._live_bytes >> 20} MiB of media; try again later"
            )
        self._waiting_bytes += size
        try:
            loop = asyncio.get_running_loop()
            content: MediaContent = await loop.run_in_executor(self._threads, work)
        finally:
            self._waiting_bytes -= size
        self._live_bytes += content.nbytes
        weakref.finalize(content, self._freed.append, content.nbytes).atexit = False
        return content

    # ------------------------------------------------------------ on a thread

    def _read(
        self, modality: str, value: Any, field: str, detail: str, options: str
    ) -> MediaContent:
        """Decode and process an item. Raises InvalidRequest."""
        reader = self._reader(modality, options)
        content = reader.content(value, field, detail)
        count = len(content.token_ids)
        if self._whole_spans and self._most_tokens is not None and count > self._most_tokens:
            raise InvalidRequest(
                f"{field}: the {reader.noun} takes {count} tokens, and a step of this server has "
                f"{self._most_tokens} (max_num_batched_tokens)",
                param=field,
            )
        return content

    def _reader(self, modality: str, options: str) -> Reader:
        """Return what reads items with a request's options. Raises InvalidRequest."""
        own = self._readers[modality]
        if not options:
            return own
        if (known := self._lowered.get((modality, options))) is not None:
            return known
        field = OPTIONS_FIELD
        try:
            processor = own.processor.lowered(json.loads(options))
        except (ConfigError, ValueError) as error:
            text = str(error).removeprefix(f"{field}: ")
            raise InvalidRequest(f"{field}.{text}", param=field) from None
        made = type(own)(processor, self._io_options.get(modality, {}))
        while len(self._lowered) >= MAX_LOWERED:
            self._lowered.pop(next(iter(self._lowered)), None)
        self._lowered[modality, options] = made
        return made

    # ------------------------------------------------------------ prompts

    def placed(
        self, token_ids: Sequence[int], contents: Sequence[MediaContent], field: str
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Put what stands for items in the place of placeholders. Raises InvalidRequest if there
        are not as many of them."""
        waiting = {name: deque[MediaContent]() for name in self.modalities}
        for content in contents:
            waiting[content.modality].append(content)
        modality_of = {
            reader.processor.placeholder_id: name for name, reader in self._readers.items()
        }

        def places() -> list[tuple[int, str]]:
            return [(n, modality_of[t]) for n, t in enumerate(token_ids) if t in modality_of]

        self._check_counts(places(), waiting, field)
        for reader in self._readers.values():
            if isinstance(reader.processor, ArrangesPrompts):
                token_ids = reader.processor.arranged(token_ids)
        expanded: list[int] = []
        items: list[MediaItem] = []
        done = 0
        for place, modality in places():
            content = waiting[modality].popleft()
            expanded += token_ids[done:place]
            items.append(MediaItem(len(expanded), content))
            expanded += content.token_ids
            done = place + 1
        return [*expanded, *token_ids[done:]], tuple(items)

    def _check_counts(
        self,
        places: Sequence[tuple[int, str]],
        waiting: Mapping[str, Sequence[MediaContent]],
        field: str,
    ) -> None:
        """Raise InvalidRequest unless each modality has as many placeholders as items."""
        for modality, contents in waiting.items():
            reader = self._readers[modality]
            count = sum(name == modality for _, name in places)
            if count == len(contents):
                continue
            token = ""
            if self._tokenizer is not None:
                name = self._tokenizer.backend.id_to_token(reader.processor.placeholder_id)
                token = f" {name}"
            raise InvalidRequest(
                f"{field}: has {count} placeholders{token} for {len(contents)} {reader.noun}s",
                param=field,
            )


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
