"""Media of prompts, from their sources to items: read, decode, process, place."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
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
from .embeds import contents_of
from .fetch import LARGE, MediaFetcher
from .readers import READERS, Reader
from .sources import OPTIONS_FIELD, Embeds, MediaSource

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
"""Most bytes of processed items that are kept for later requests."""


class MediaInput:
    """Makes items of a prompt's media; one per engine, or front end."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        media: MediaConfig,
        plugins: Plugins,
        tokenizer: Tokenizer | None,
        row_width: int,
    ) -> None:
        """row_width: as `ExecutorInfo`."""
        self.modalities = media.modalities
        self._takes_embeds = config.enable_mm_embeds
        self._row_width, self._longest = row_width, model_config.max_model_len
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
        self._making: dict[bytes, asyncio.Future[list[MediaContent]]] = {}
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
        self._check_limits([(source.modality, source.field) for source in sources])
        tasks = [asyncio.ensure_future(self._contents(source)) for source in sources]
        try:
            lists = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        pairs = zip(sources, lists, strict=True)
        self._check_limits([(s.modality, s.field) for s, contents in pairs for _ in contents])
        return [content for contents in lists for content in contents]

    def _check_limits(self, items: Sequence[tuple[str, str]]) -> None:
        """Raise InvalidRequest for too many items, of which the modality and field are given."""
        for modality, limit in self._limits.items():
            fields = [field for name, field in items if name == modality]
            if len(fields) > limit:
                raise InvalidRequest(
                    f"{fields[limit]}: at most {limit} of {modality} per prompt "
                    "(limit_mm_per_prompt)",
                    param=fields[limit],
                )

    async def _contents(self, source: MediaSource) -> list[MediaContent]:
        """Return a source's items: one, but for embeddings of several."""
        if not isinstance(source.value, Embeds):
            return [await self._content(source)]
        embeds, field = source.value, source.field
        if not self._takes_embeds:
            raise InvalidRequest(
                f"{field}: this server takes no embeddings of media (--enable-mm-embeds)",
                param=field,
            )
        if source.options:
            raise InvalidRequest(
                f"{OPTIONS_FIELD}: there are no options for embeddings; leave it out",
                param=OPTIONS_FIELD,
            )
        return await self._on_thread(
            embeds.nbytes, functools.partial(self._read_embeds, embeds, field)
        )

    async def _content(self, source: MediaSource) -> MediaContent:
        value, (modality, _, field, detail, options) = source.value, source
        if isinstance(value, str):
            value = await self._fetcher.read(value, field, modality)
        read = functools.partial(self._read, modality, value, field, detail, options)
        if not isinstance(value, bytes | bytearray | memoryview):
            [content] = await self._on_thread(0, read)
            return content
        key = await self._hashed(value, modality, detail, options)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        if (making := self._making.get(key)) is None:
            making = asyncio.ensure_future(self._on_thread(len(value), read))
            self._making[key] = making
            making.add_done_callback(functools.partial(self._made, key))
        try:
            # Who goes away does not take it from others who wait.
            [content] = await asyncio.shield(making)
            return content
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

    def _made(self, key: bytes, made: asyncio.Future[list[MediaContent]]) -> None:
        del self._making[key]
        if made.cancelled() or made.exception() is not None:
            return
        [content] = made.result()
        self._kept[key] = content
        self._kept_bytes += content.nbytes
        while self._kept_bytes > CACHE_BYTES:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes

    async def _on_thread(
        self, size: int, work: Callable[[], list[MediaContent]]
    ) -> list[MediaContent]:
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
            contents = await loop.run_in_executor(self._threads, work)
        finally:
            self._waiting_bytes -= size
        for content in contents:
            self._live_bytes += content.nbytes
            weakref.finalize(content, self._freed.append, content.nbytes).atexit = False
        return contents

    # ------------------------------------------------------------ on a thread

    def _read(
        self, modality: str, value: Any, field: str, detail: str, options: str
    ) -> list[MediaContent]:
        """Decode and process an item. Raises InvalidRequest."""
        reader = self._reader(modality, options)
        return self._checked([reader.content(value, field, detail)], field)

    def _read_embeds(self, embeds: Embeds, field: str) -> list[MediaContent]:
        """Return the items of embeddings. Raises InvalidRequest."""
        processor = self._readers[embeds.modality].processor
        contents = contents_of(embeds, processor, self._row_width, self._longest, field)
        return self._checked(contents, field)

    def _checked(self, contents: list[MediaContent], field: str) -> list[MediaContent]:
        """Return items whose tokens can be computed together if they must be. Raises
        InvalidRequest."""
        for content in contents:
            count = len(content.token_ids)
            if self._whole_spans and self._most_tokens is not None and count > self._most_tokens:
                noun = self._readers[content.modality].noun
                raise InvalidRequest(
                    f"{field}: the {noun} takes {count} tokens, and a step of this server has "
                    f"{self._most_tokens} (max_num_batched_tokens)",
                    param=field,
                )
        return contents

    def _reader(self, modality: str, options: str) -> Reader:
        """Return what reads items with a request's options. Raises InvalidRequest."""
        own = self._readers[modality]
        if not options:
            return own
        if (known := self._lowered.get((modality, options))) is not None:
            return known
        field = OPTIONS_FIELD
        try:
            if not hasattr(own.processor, "lowered"):
                names = ", ".join(json.loads(options))
                raise ValueError(f"{names}: is no option of this model's {own.noun}s")
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
        are not as many of them, and for prompts that the model does not take."""
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
                try:
                    token_ids = reader.processor.arranged(token_ids)
                except ValueError as error:
                    raise InvalidRequest(f"{field}: {error}", param=field) from None
        expanded: list[int] = []
        items: list[MediaItem] = []
        done = 0
        for place, modality in places():
            content = waiting[modality].popleft()
            expanded += token_ids[done:place]
            items.append(MediaItem(len(expanded), content))
            expanded += content.token_ids
            done = place + 1
        expanded += token_ids[done:]
        self._check_last(items, len(expanded), field)
        return expanded, tuple(items)

    def _check_last(self, items: Sequence[MediaItem], num_tokens: int, field: str) -> None:
        """Raise InvalidRequest if an item that is not split fits in a step, and not with an item
        that is the prompt's last token alone, which is computed with the token before it."""
        if not self._whole_spans or self._most_tokens is None or len(items) < 2:
            return
        before, last = items[-2:]
        behind = last.start == num_tokens - 1 == before.end
        if behind and num_tokens - before.start > self._most_tokens:
            raise InvalidRequest(
                f"{field}: its last two items take {num_tokens - before.start} tokens, and a step "
                f"of this server has {self._most_tokens} (max_num_batched_tokens)",
                param=field,
            )

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
