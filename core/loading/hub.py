"""Repositories of the Hugging Face hub in its cache: fetched, resumed, and checked by digest.

`huggingface_hub` resumes downloads and checks sizes; names of cached files are their digests, which
are checked here. HF_ENDPOINT (a mirror), HF_TOKEN, HF_HUB_CACHE and HF_HUB_OFFLINE are its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import LoadError
from ..local_path import local_path

CHECKPOINT_FILES = (
    "*.json", "*.safetensors", "*.jinja", "tokenizer.model", "tiktoken.model", "*.txt",
)  # fmt: skip
TOKENIZER_FILES = (
    "*.json", "tokenizer.model", "tiktoken.model", "*.tiktoken", "vocab*", "merges.txt",
    "chat_template*",
)  # fmt: skip
SHA256 = re.compile("[0-9a-f]{64}")
"""Digest of a large file's content."""
GIT = re.compile("[0-9a-f]{40}")
"""Git's digest of a small one."""
AT_ONCE = 4
"""Files checked in parallel."""
CHUNK = 1 << 20


def fetch_snapshot(
    repo: str,
    revision: str | None,
    files: Iterable[str],
    *,
    download_dir: str | None = None,
    check_all: bool = False,
) -> Path:
    """Return the folder of a repository's files at a revision, fetching those that are not there.

    files: patterns of names. check_all: check files that were there before, too. A file with
    another digest is fetched once more. Raises LoadError if it is wrong again, and what
    `huggingface_hub` raises.
    """
    from huggingface_hub import snapshot_download

    cache = None if download_dir is None else local_path(download_dir)
    blobs = repo_folder(repo, cache) / "blobs"
    checked = frozenset[str]() if check_all else _names(blobs)
    wrong: list[Path] = []
    for _ in range(2):
        snapshot = snapshot_download(
            repo, revision=revision, allow_patterns=list(files), cache_dir=cache
        )
        wrong = _wrong(blobs / name for name in _names(blobs) - checked)
        if not wrong:
            return Path(snapshot)
        checked = _names(blobs) - {path.name for path in wrong}
        _remove(Path(snapshot), wrong)
    names = ", ".join(path.name[:12] for path in wrong)
    raise LoadError(
        f"{repo}: what was fetched has another digest than the hub says ({names}), twice; it was "
        "removed. Try again later, or without HF_ENDPOINT"
    )


def repo_folder(repo: str, cache: Path | None) -> Path:
    """Return where a cache has a repository; None: the hub's own."""
    from huggingface_hub import constants

    return (cache or Path(constants.HF_HUB_CACHE)) / f"models--{repo.replace('/', '--')}"


def has_right_digest(blob: Path) -> bool:
    """Return whether a cached file has the digest in its name; True if its name has none."""
    if SHA256.fullmatch(blob.name):
        digest = hashlib.sha256()
    elif GIT.fullmatch(blob.name):
        digest = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
    else:
        return True
    with blob.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == blob.name


def _wrong(blobs: Iterable[Path]) -> list[Path]:
    paths = list(blobs)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        right = pool.map(has_right_digest, paths)
        return [path for path, is_right in zip(paths, right, strict=True) if not is_right]


def _names(blobs: Path) -> frozenset[str]:
    """Return the names of the files that are whole."""
    if not blobs.is_dir():
        return frozenset()
    return frozenset(path.name for path in blobs.iterdir() if path.suffix != ".incomplete")


def _remove(snapshot: Path, blobs: list[Path]) -> None:
    """Remove files, and a snapshot's links to them."""
    gone = {blob.resolve() for blob in blobs}
    for link in snapshot.rglob("*"):
        if link.is_symlink() and link.resolve() in gone:
            link.unlink()
    for blob in blobs:
        blob.unlink(missing_ok=True)
