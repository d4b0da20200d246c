"""What a command's model means: an alias's model, a copy of an object store's, or itself."""

from __future__ import annotations

import os
from typing import NamedTuple

from . import object_store
from .aliases import read_aliases


class NamedModel(NamedTuple):
    model: str
    """For `EngineConfig.model`: a folder or a hub name."""
    name: str | None
    """What it was called, as a name for requests; None: it is called `model`."""


def find_model(model: str, download_dir: str | None = None, *, fetch: bool = True) -> NamedModel:
    """Return the model that a name means; a folder of this name goes before an alias.

    fetch: copy it from an object store, if it is there. Raises as `object_store.fetch`, and
    ConfigError if the aliases cannot be read.
    """
    target = model
    if model and not os.path.exists(model):
        target = read_aliases().get(model, model)
    name = model if target != model else None
    if not object_store.is_url(target):
        return NamedModel(target, name)
    if fetch:
        folder = object_store.fetch(target, download_dir)
    else:
        folder = object_store.copy_folder(target, download_dir)
    return NamedModel(str(folder), name or target.rstrip("/").rpartition("/")[2])
