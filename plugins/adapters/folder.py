"""Finds adapters in a folder by the names of its subfolders."""

from __future__ import annotations

import asyncio
from pathlib import Path, PurePosixPath

from ...core.config import EngineConfig
from ...core.local_path import local_path


class FolderResolver:
    """Adapters in `EngineConfig.lora_resolver_cache_dir`. A name cannot leave the folder, whatever
    it has in it, and neither can a link in it. Each path has one name."""

    def __init__(self, config: EngineConfig) -> None:
        folder = config.lora_resolver_cache_dir
        self._folder = None if folder is None else local_path(folder)

    async def resolve(self, name: str, base_model: str) -> Path | None:
        if self._folder is None:
            return None
        return await asyncio.to_thread(_inside, self._folder, name)


def _inside(folder: Path, name: str) -> Path | None:
    """Return the path of a name in a folder, without links; None: there is none inside."""
    plain = PurePosixPath(name)
    if str(plain) != name or plain.is_absolute() or ".." in plain.parts:
        return None  # Else "a", "./a" and "a/../a" would be as many adapters.
    try:
        root = folder.resolve(strict=True)
        path = (root / name).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):  # None, a name that no file has, a circle of links.
        return None
    return path if root in path.parents else None
