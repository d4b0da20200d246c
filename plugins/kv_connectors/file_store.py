"""KV blocks as files in a folder that many engines may share."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ...core.errors import ConfigError
from ...core.local_path import local_path
from ...core.protocols.kv import KVConnectorSetup
from ...core.recording.private_files import (
    FOLDER_MODE,
    make_given_folder,
    make_private_folder,
    private_opener,
)
from .options import read_options
from .store import StoreConnector

SUFFIX = ".safetensors"
UNFINISHED = ".unfinished"
UNFINISHED_SECONDS = 3600.0
"""Age in seconds at which an unfinished file is removed."""
SCAN_SHARE = 0.05
"""Share of the limit that this engine may write between measurements of the folder."""
KEEP_SHARE = 0.9
"""Share of the limit that eviction keeps."""


class FileStoreOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of file_store."""

    path: Annotated[str, Meta(min_length=1)]
    """Folder; created if missing."""
    max_gib: Annotated[float, Meta(gt=0)] = 10.0
    """GiB of all files in it together. Above it, the least recently read are removed."""


class FileStore:
    """`path/FINGERPRINT/KE/KEY.safetensors`, renamed into place, private to the engine's user.

    mtime is the last write or read. Each engine measures the folder separately, so each may exceed
    the limit by `SCAN_SHARE`.
    """

    def __init__(self, setup: KVConnectorSetup) -> None:
        options = read_options(setup.transfer.kv_connector_extra_config, FileStoreOptions)
        self._root = local_path(options.path)
        self._folder = self._root / setup.layout.fingerprint.hex()[:32]
        self._limit = int(options.max_gib * (1 << 30))
        self._lock = threading.Lock()
        self._size: int | None = None
        """Bytes of all files: last measurement plus later writes; None: not measured."""
        self._since_scan = 0
        try:
            make_given_folder(self._root, "kv_connector_extra_config.path")
            make_private_folder(self._folder)
        except OSError as error:
            raise ConfigError(
                f"kv_connector_extra_config.path: {options.path!r} cannot be made: {error}",
                param="kv_transfer_config",
            ) from error

    def count_present(self, keys: Sequence[bytes]) -> int:
        """Count leading keys with files, whose content is checked later."""
        for number, key in enumerate(keys):
            if not self._path(key).is_file():
                return number
        return len(keys)

    def get(self, key: bytes) -> bytes | None:
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        with contextlib.suppress(OSError):  # Evicted, or read-only of another user.
            os.utime(path)
        return data

    def put(self, key: bytes, data: bytes) -> None:
        """Write a file atomically."""
        if len(data) > self._limit * KEEP_SHARE:
            return
        self._make_room(len(data))
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
        unfinished = path.parent / f"{uuid.uuid4().hex}{UNFINISHED}"
        try:
            with open(unfinished, "xb", opener=private_opener) as file:
                file.write(data)
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def remove(self, key: bytes) -> None:
        self._path(key).unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}{SUFFIX}"

    def _make_room(self, size: int) -> None:
        with self._lock:
            if self._size is None or (
                self._since_scan + size > self._limit * SCAN_SHARE
                or self._size + size > self._limit
            ):
                self._size = self._evict(size)
                self._since_scan = 0
            self._size += size
            self._since_scan += size

    def _evict(self, size: int) -> int:
        """Measure the folder, and remove the oldest files if `size` more bytes do not fit. Return
        the bytes left.
        """
        files = sorted(self._files())
        total = sum(file_size for _, file_size, _ in files)
        if total + size <= self._limit:
            return total
        for _, file_size, path in files:
            if total + size <= self._limit * KEEP_SHARE:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= file_size
        return total

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Yield (mtime, bytes, path) of each block of any model."""
        forgotten = time.time() - UNFINISHED_SECONDS
        for folder, _, names in os.walk(self._root):
            for name in names:
                if not name.endswith((SUFFIX, UNFINISHED)):
                    continue
                path = os.path.join(folder, name)
                try:
                    facts = os.stat(path)
                    if name.endswith(UNFINISHED) and facts.st_mtime < forgotten:
                        os.unlink(path)
                        continue
                except FileNotFoundError:  # Another engine evicts, too.
                    continue
                if name.endswith(SUFFIX):
                    yield facts.st_mtime, facts.st_size, path


class FileStoreConnector(StoreConnector):
    store_class = FileStore
    per_rank = True
