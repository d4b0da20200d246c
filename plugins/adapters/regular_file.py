"""Regular files of a folder that a stranger has filled, opened once and read with bounds.

Read with `pread`, not mapped: a file that is cut off while it is mapped ends the process.
"""

from __future__ import annotations

import os
import stat
import weakref
from pathlib import Path

import numpy as np

from ...core.errors import ConfigError

HUB_FILES = "blobs"
"""The folder to which a snapshot's links point in the cache of Hugging Face's hub."""


class RegularFile:
    """A file that stays open, and must not change."""

    kind = "file"
    """What it should be, for messages."""

    def __init__(self, path: Path, folder: Path) -> None:
        """Raises ConfigError if it is no file of `folder`."""
        self.name = path.name
        self._descriptor = open_regular(path, folder)
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        self._identity = _identity(status)

    def read_bytes(self, offset: int, size: int) -> bytes:
        """Read bytes. Raises ConfigError if the file has changed since it was opened."""
        return self.read_array(offset, size).tobytes()

    def read_array(self, offset: int, size: int) -> np.ndarray:
        """Read bytes without a copy: uint8 [size]. Raises ConfigError as `read_bytes` does."""
        content = np.empty(size, dtype=np.uint8)
        view, done = memoryview(content.data), 0
        while done < size:
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if not count:
                raise self.refused("it ends before its last tensor does")
            done += count
        if _identity(os.fstat(self._descriptor)) != self._identity:
            raise self.refused("it was changed while it was read")
        return content

    def refused(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.name} is not a {self.kind}: {reason}", param=self.name)


def open_regular(path: Path, folder: Path) -> int:
    """Open a regular file of a folder, and return its descriptor. Links may point to files of the
    same folder, or of the hub's cache that the folder belongs to.

    Raises ConfigError for all else: pipes, devices, links that leave.
    """
    try:
        target, root = path.resolve(strict=True), folder.resolve(strict=True)
        cache = root.parent.parent / HUB_FILES
        if not (target.is_relative_to(root) or target.is_relative_to(cache)):
            raise ConfigError(f"{path.name} is a link that leaves its folder", param=path.name)
        # Without O_NONBLOCK, opening a pipe waits for its writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        descriptor = os.open(target, flags)
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path.name} cannot be read: {reason}", param=path.name) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path.name} is not a regular file", param=path.name)
    return descriptor


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
