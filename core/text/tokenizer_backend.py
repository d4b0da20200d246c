"""Where a checkpoint's tokenizer comes from: tokenizer.json, or other files through transformers.

The checkpoint's code never runs.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as Backend

from ..errors import CheckpointNotFound, LoadError
from ..loading.hub import TOKENIZER_FILES, fetch_snapshot
from ..loading.json_file import check_fetched
from ..loading.transformers_module import transformers_module


def fetch_tokenizer(name: str, revision: str | None, download_dir: str | None) -> Path:
    """Return the folder of a hub's tokenizer. Raises LoadError."""
    try:
        return fetch_snapshot(name, revision, TOKENIZER_FILES, download_dir=download_dir)
    except LoadError:
        raise
    except Exception as error:
        raise CheckpointNotFound(
            f"tokenizer: {name!r} is no folder here, and cannot be fetched from the hub: {error}",
            param="tokenizer",
        ) from error


def backend_from_file(file: Path) -> Backend:
    """Return the tokenizer of a tokenizer.json. Raises LoadError."""
    check_fetched(file)
    try:
        return Backend.from_file(str(file))
    except Exception as error:
        raise LoadError(f"tokenizer: {file} cannot be read: {error}") from error


def _has_vocabulary(backend: Backend) -> bool:
    """Return whether a tokenizer has text tokens: without a vocabulary, transformers creates one
    that encodes every text to nothing.
    """
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return any(token.strip("▁Ġ ") for token in vocabulary if token not in added)


def backend_from_transformers(folder: Path) -> tuple[Backend, dict[str, str]]:
    """Return the tokenizer that transformers reads from a folder's files, and its special tokens by
    role. Raises LoadError."""
    kind = transformers_module().AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise LoadError(
            f"tokenizer: {folder} has no tokenizer.json, and nothing else that can be used "
            f"({reason}); copy one there, or name the tokenizer with --tokenizer"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise LoadError(
            f"tokenizer: {type(tokenizer).__name__} in {folder} has no fast implementation; save "
            "one with `tokenizer.json` beside it"
        )
    if not _has_vocabulary(backend):
        raise LoadError(
            f"tokenizer: {folder} has no file with a vocabulary, such as tokenizer.json or "
            "tokenizer.model; copy one there, or name the tokenizer with --tokenizer"
        )
    special_tokens = {
        key: str(value)
        for key, value in tokenizer.special_tokens_map.items()
        if key.endswith("_token")
    }
    return backend, special_tokens
