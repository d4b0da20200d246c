"""`Tokenizer`: text to token ids and back, over the `tokenizers` library.

Reads tokenizer.json directly, so that starting up does not import transformers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ..errors import InvalidRequest, shown
from ..registration.checkpoint_formats import AUTO, tokenizer_format
from ..registration.registered import Registry
from .control_tokens import ControlTokens
from .token_bytes import BytePieces, byte_pieces
from .token_limit import PIECE, TokenLimit, encode_text, encode_within
from .tokenizer_backend import (
    backend_from_file,
    backend_from_transformers,
    fetch_tokenizer,
)
from .tokenizer_files import (
    DeclaredTokens,
    chat_templates,
    format_templates,
    read_json,
    template_text,
)

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..loading.model_config import ModelConfig
    from ..registry import Plugins

_MARKUP = frozenset("<>[]|｜{}")
_LOSSY_CHARACTERS = 256


class Tokenizer:
    """One checkpoint's tokenizer. Immutable after loading; encoding may run on any thread."""

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        chat_templates: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """special_tokens: role → token (pad_token, unk_token …), for chat templates."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.chat_templates = dict(chat_templates or {})
        """name → Jinja text; "default" is the one for plain chat, "tool_use" the one with tools."""
        self.special_tokens = dict(special_tokens or {})
        self.added_tokens: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(
            id for id, token in self.added_tokens.items() if token.special
        )
        self.bos_token_id = self._id_of(bos_token)
        self.eos_token_id = self._id_of(eos_token)
        self.unknown_id = self._id_of(self.special_tokens.get("unk_token"))
        """Id of the token for unknown text; None: there is none."""
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Tokens, added ones included."""
        self.max_token_id = max(self.vocab_size - 1, max(self.added_tokens, default=0))
        self.pieces: BytePieces | None = byte_pieces(backend.decoder)
        """How tokens become bytes one by one; None where the decoder looks at neighbours."""
        kind = json.loads(backend.decoder.__getstate__())["type"] if backend.decoder else None
        self.joins_with_spaces = kind in (None, "WordPiece")
        """Whether decoding puts spaces between tokens."""
        self._bytes: dict[int, bytes] = {}
        self._whole: dict[int, str] = {}
        self._texts: dict[int, str] = {}

    # ------------------------------------------------------------ loading

    @classmethod
    def of_engine(
        cls, config: EngineConfig, model_config: ModelConfig, plugins: Plugins
    ) -> Tokenizer:
        """Load the tokenizer that an engine's configuration names. Raises as `load`."""
        return cls.load(
            config.tokenizer or str(model_config.path),
            revision=config.tokenizer_revision,
            chat_template=config.chat_template,
            formats=plugins["checkpoint_format"],
            mode=config.tokenizer_mode,
            download_dir=config.download_dir,
        )

    @classmethod
    def load(
        cls,
        path: str,
        *,
        revision: str | None = None,
        chat_template: str | None = None,
        formats: Registry[Any] | None = None,
        mode: str = AUTO,
        download_dir: str | None = None,
    ) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder, or of a hub name.

        chat_template: Jinja text, or a file's path, instead of the checkpoint's own. formats: the
        checkpoint formats, of which `mode` (`EngineConfig.tokenizer_mode`) chooses; None: the usual
        files alone are read.
        Raises LoadError when there is no tokenizer, or none with a fast implementation, and
        ConfigError when `chat_template` is a path that cannot be read, or there is no format of
        this name.
        """
        folder = Path(path)
        if not folder.is_dir():
            folder = fetch_tokenizer(path, revision, download_dir)
        if formats is not None and (name := tokenizer_format(formats, mode, folder)) is not None:
            templates = format_templates(formats, name, folder, chat_template)
            with formats.calling(name, "read_tokenizer"):
                tokenizer: Tokenizer = formats.load(name).read_tokenizer(folder, templates)
                if not isinstance(tokenizer, Tokenizer):
                    raise TypeError(f"it returned {shown(tokenizer)}, which is no Tokenizer")
            return tokenizer
        config = read_json(folder / "tokenizer_config.json")
        declared = DeclaredTokens.read(folder, config)
        tokens = declared.strings
        if chat_template is None:
            templates = chat_templates(folder, config)
        else:
            templates = {"default": template_text(chat_template)}
        file = folder / "tokenizer.json"
        if file.is_file():
            backend = backend_from_file(file)
            declared.add_to(backend)
        else:
            backend, file_tokens = backend_from_transformers(folder)
            tokens = {**file_tokens, **tokens}
        return cls(
            backend,
            bos_token=tokens.get("bos_token"),
            eos_token=tokens.get("eos_token"),
            chat_templates=templates,
            special_tokens=tokens,
        )

    @property
    def chat_template(self) -> str | None:
        """The template for plain chat, as Jinja text."""
        return self.chat_templates.get("default")

    # ------------------------------------------------------------ text → ids

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        allow_special: bool = True,
        limit: TokenLimit | None = None,
    ) -> list[int]:
        """Return the token ids of `text`.

        add_special_tokens: put BOS and the like where the tokenizer's own rules say.
        allow_special: special tokens typed in `text` become those tokens; off, they stay text.
        limit: see `encode_within`, which says what it raises.
        """
        if not isinstance(text, str):
            raise InvalidRequest(
                f"prompt must be a string, got {type(text).__name__}", param="prompt"
            )
        text = _without_surrogates(text)

        def encoded(text: str) -> list[int]:
            if not allow_special:
                return self._specials.encode_plain(text, add_special_tokens=add_special_tokens)
            token_ids: list[int] = encode_text(
                self.backend, text, add_special_tokens=add_special_tokens
            ).ids
            return token_ids

        return encode_within(text, limit, encoded, lambda: self.characters_per_token)

    @functools.cached_property
    def characters_per_token(self) -> int:
        """The maximum number of characters per token; larger than that of any real text where the
        tokenizer may drop or join characters (white space, accents, unknown words)."""
        longest = max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)
        return longest if self._keeps_characters else max(longest, _LOSSY_CHARACTERS)

    @property
    def _keeps_characters(self) -> bool:
        model, normalizer = self.backend.model, self.backend.normalizer
        if type(model).__name__ != "BPE" or getattr(model, "fuse_unk", False):
            return False
        spec = None if normalizer is None else json.loads(normalizer.__getstate__())
        return _keeps_length(spec)

    def encode_texts(
        self,
        text: str,
        pair: str | None = None,
        *,
        limit: int | None = None,
        most: TokenLimit | None = None,
        add_special_tokens: bool = True,
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of one text or of two, and to which of the two (0 or 1) each
        belongs.

        limit: at most so many tokens; the texts' ends are cut, the longer one's first, and special
        tokens stay. Raises InvalidRequest when these alone are as many. most: without a limit, what
        raises for a text that alone is too long.
        """
        text = _without_surrogates(text)
        pair = None if pair is None else _without_surrogates(pair)
        if limit is None:
            if most is not None:
                for item in (text, pair or ""):
                    self._check_fits(item, most)
            whole = encode_text(self.backend, text, pair, add_special_tokens=add_special_tokens)
            return whole.ids, whole.type_ids
        room = limit
        if add_special_tokens:
            room -= self.backend.num_special_tokens_to_add(pair is not None)
        if room < 1:
            raise InvalidRequest(
                f"truncate_prompt_tokens: {limit} leaves no room beside the special tokens",
                param="truncate_prompt_tokens",
            )
        parts = [self._encode_start(item, room) for item in (text, pair) if item is not None]
        for part, length in zip(parts, _kept([len(part) for part in parts], room), strict=True):
            part.truncate(length)
        second = parts[1] if len(parts) > 1 else None
        joined = self.backend.post_process(parts[0], second, add_special_tokens)
        return joined.ids, joined.type_ids

    def first_tokens(self, text: str, count: int) -> str:
        """Return the beginning of a text that has at most this many tokens, without special ones
        around it."""
        ids, _ = self.encode_texts(text, limit=count + 1, add_special_tokens=False)
        return text if len(ids) <= count else self.decode(ids[:count], skip_special_tokens=False)

    def _check_fits(self, text: str, most: TokenLimit) -> None:
        """Raise for a too long text without encoding all of it."""
        if len(text) > max(PIECE, 4 * most.tokens):
            self.encode(text, add_special_tokens=False, limit=most)

    def _encode_start(self, text: str, num_tokens: int) -> Any:
        """Return the Encoding of a text's first tokens."""
        size = max(PIECE, 4 * num_tokens)
        while True:
            part = encode_text(self.backend, text[:size], add_special_tokens=False)
            if len(part) > num_tokens + PIECE // 1024 or size >= len(text):
                return part
            size *= 4

    @functools.cached_property
    def _specials(self) -> ControlTokens:
        return self.control_tokens("")

    def control_tokens(self, template: str) -> ControlTokens:
        """Return what users must not be able to type in a chat rendered by `template` (Jinja text).

        The special tokens, and the added tokens that the template itself writes as markup
        (`<tool_response>`): those are tokens too, though vocabularies do not call them special.
        """
        contents = {
            token.content
            for token in self.added_tokens.values()
            if token.special or (_MARKUP & set(token.content) and token.content in template)
        }
        return ControlTokens(self.backend, contents)

    def bad_words_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of `words`, at the start of a text and after a space; no
        duplicates.

        The second form counts where the space belongs to the word's first token, as in vLLM.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = tuple(self.encode(word.lstrip(), add_special_tokens=False))
            spaced = tuple(self.encode(" " + word.lstrip(), add_special_tokens=False))
            if bare:
                sequences[bare] = None
            if bare and spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
                sequences[spaced] = None
        return tuple(sequences)

    # ------------------------------------------------------------ ids → text

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD.

        spaces_between_special_tokens matters for decoders that join tokens with spaces: off, added
        tokens stand without spaces around them. Raises InvalidRequest for an id out of range.
        """
        self.check_ids(ids)
        if skip_special_tokens:
            ids = [id for id in ids if id not in self.special_ids]
        if self.pieces is not None:
            text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
            return strip_spaces(text, self.pieces.strip_start)
        if spaces_between_special_tokens or not self.joins_with_spaces:
            return self.backend.decode(ids, skip_special_tokens=False)
        parts: list[list[int]] = [[]]
        for id in ids:
            if id in self.added_tokens:
                parts += [[id], []]
            else:
                parts[-1].append(id)
        return "".join(self.backend.decode(part, skip_special_tokens=False) for part in parts)

    def check_ids(self, ids: Sequence[int], *, param: str = "prompt") -> None:
        """Raise InvalidRequest unless every id is one of this vocabulary."""
        for id in ids:
            if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id <= self.max_token_id:
                raise InvalidRequest(
                    f"{param}: token id {id!r} is not in the vocabulary (0 to {self.max_token_id})",
                    param=param,
                )

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that one token adds inside a text; empty for an id without a token.

        Where the decoder looks at neighbours: the bytes of the token decoded alone.
        """
        data = self._bytes.get(id)
        if data is None:
            token = self.backend.id_to_token(id) if 0 <= id <= self.max_token_id else None
            if token is None:
                data = b""
            elif self.pieces is None:
                data = self.backend.decode([id], skip_special_tokens=False).encode()
            else:
                data = self.pieces.bytes_of(token)
            self._bytes[id] = data
        return data

    def whole_text(self, id: int) -> str:
        """Return the text of one token's bytes; empty if they are not complete characters."""
        text = self._whole.get(id)
        if text is None:
            try:
                text = self.token_bytes(id).decode()
            except UnicodeDecodeError:
                text = ""
            self._whole[id] = text
        return text

    def token_text(self, id: int) -> str:
        """Return how one token is shown beside its log-probability; U+FFFD for an incomplete
        character.

        Its leading space is kept. Empty for an id without a token (a padded vocabulary's).
        """
        text = self._texts.get(id)
        if text is None:
            text = self._texts[id] = self.token_bytes(id).decode("utf-8", "replace")
        return text

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)


def _keeps_length(normalizer: dict[str, Any] | None) -> bool:
    """Return whether a normalizer never shortens a text much."""
    if normalizer is None:
        return True
    match normalizer.get("type"):
        case "NFC" | "NFD" | "Prepend":
            return True
        case "Replace":
            pattern = normalizer["pattern"].get("String")
            return pattern is not None and len(normalizer["content"]) >= len(pattern)
        case "Sequence":
            return all(map(_keeps_length, normalizer["normalizers"]))
    return False


def strip_spaces(text: str, count: int) -> str:
    return text[:count].lstrip(" ") + text[count:]


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates (from JSON escapes) by U+FFFD."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _kept(lengths: list[int], room: int) -> list[int]:
    """Return how much of one or two texts fits; the longer is truncated first."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    shorter = min(min(lengths), room // 2)
    kept = [room - shorter, room - shorter]
    kept[lengths.index(min(lengths))] = shorter
    return kept
