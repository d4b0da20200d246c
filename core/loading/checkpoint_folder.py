"""The folder of a model: a path, a model that ships with Jackfield, or one from the hub."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import CheckpointNotFound, LoadError
from ..local_path import is_file, is_folder, local_path
from .hub import CHECKPOINT_FILES, fetch_snapshot

MODELS = Path(__file__).resolve().parents[2] / "plugins" / "models"
EMBEDDED_MODEL = MODELS / "embedded"
"""What an engine serves that is given no model."""


def checkpoint_folder(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """Return the folder of a path, of a model that ships with Jackfield by its name there, of a hub
    name, which is fetched, or of the embedded model (empty)."""
    if not model:
        if not (EMBEDDED_MODEL / "config.json").is_file():
            raise LoadError("the embedded model is missing from this installation", param="model")
        return EMBEDDED_MODEL
    folder = local_path(model)
    if is_folder(folder):
        return folder
    if is_file(folder):
        raise CheckpointNotFound(
            f"model: {model!r} is a file; name the folder with config.json and the weights",
            param="model",
        )
    if re.fullmatch("[a-z-]+", model):
        own = MODELS / model.replace("-", "_")
        if is_file(own / "config.json"):
            return own
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointNotFound(
            f"model: {model!r} is neither a folder here nor a hub name (owner/name)",
            param="model",
        )
    try:
        return fetch_snapshot(model, revision, CHECKPOINT_FILES, download_dir=download_dir)
    except LoadError:
        raise
    except Exception as error:
        raise CheckpointNotFound(
            f"model: {model!r} is no folder here and cannot be fetched from the hub "
            f"({type(error).__name__}: {error}); give a local path, or download it first",
            param="model",
        ) from error
