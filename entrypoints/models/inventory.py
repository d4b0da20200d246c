"""The models that this machine has, and their removal."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...core.config.model_names import HubName, local_or_hub_name
from ...core.errors import ConfigError, shown
from ...core.local_path import local_path
from . import object_store
from .aliases import read_aliases, remove_alias


class StoredModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model on this machine."""

    name: str
    num_bytes: int
    path: str
    revision: str = ""
    """The hub's commit."""
    refs: tuple[str, ...] = ()
    """Branches and tags of it."""
    complete: bool = True
    aliases: tuple[str, ...] = ()


def stored_models(download_dir: str | None = None) -> list[StoredModel]:
    """Return the models in the hub's cache and in copies, by name."""
    aliases: dict[str, tuple[str, ...]] = {}
    for alias, model in read_aliases().items():
        aliases[model] = (*aliases.get(model, ()), alias)
    models = [
        msgspec.structs.replace(each, aliases=tuple(_aliases_of(each, aliases)))
        for each in (*_of_hub(download_dir), *_of_stores(download_dir))
    ]
    return sorted(models, key=lambda each: (each.name, each.revision))


def _aliases_of(model: StoredModel, aliases: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield a model's aliases; one without a revision means the branch main."""
    if not model.revision or "main" in model.refs:
        yield from aliases.get(model.name, ())
    for revision in (model.revision, *model.refs):
        yield from aliases.get(f"{model.name}@{revision}", ())


def remove_model(name: str, download_dir: str | None = None) -> str:
    """Remove an alias, or a model's files; return what was removed, in a sentence.

    Raises ConfigError if there is none of this name.
    """
    if remove_alias(name):
        return f"removed the alias {name}; its model stays"
    if object_store.is_url(name):
        folder = object_store.copy_folder(name, download_dir)
        if object_store.read_manifest(folder) is None:
            raise _unknown(name)
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        shutil.rmtree(folder)
        return f"removed {name}: {size_text(num_bytes)}"
    hub_name = local_or_hub_name(name, "model")
    repo, revision = hub_name if isinstance(hub_name, HubName) else (hub_name, None)
    return _remove_from_hub(name, repo, revision, download_dir)


def _remove_from_hub(name: str, repo: str, revision: str | None, download_dir: str | None) -> str:
    from huggingface_hub import scan_cache_dir

    folder = _cache(download_dir)
    if not folder.is_dir():
        raise _unknown(name)
    cache = scan_cache_dir(folder)
    commits = [
        each.commit_hash
        for stored in cache.repos
        if stored.repo_type == "model" and stored.repo_id == repo
        for each in stored.revisions
        if revision is None or revision in each.refs or each.commit_hash == revision
    ]
    if not commits:
        raise _unknown(name)
    strategy = cache.delete_revisions(*commits)
    strategy.execute()
    return f"removed {name}: {size_text(strategy.expected_freed_size)}"


def _of_hub(download_dir: str | None) -> Iterator[StoredModel]:
    from huggingface_hub import scan_cache_dir

    folder = _cache(download_dir)
    if not folder.is_dir():
        return
    for repo in scan_cache_dir(folder).repos:
        if repo.repo_type != "model":
            continue
        for each in repo.revisions:
            yield StoredModel(
                repo.repo_id, each.size_on_disk, str(each.snapshot_path), each.commit_hash,
                tuple(sorted(each.refs)),
            )  # fmt: skip


def _of_stores(download_dir: str | None) -> Iterator[StoredModel]:
    root = object_store.copies_folder(download_dir)
    for path in sorted(root.rglob(object_store.MANIFEST)):
        manifest = object_store.read_manifest(path.parent)
        if manifest is not None:
            num_bytes = sum(file.size for file in manifest.files.values())
            yield StoredModel(manifest.url, num_bytes, str(path.parent), complete=manifest.complete)


def _cache(download_dir: str | None) -> Path:
    from huggingface_hub import constants

    return local_path(download_dir or constants.HF_HUB_CACHE)


def size_text(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _unknown(name: str) -> ConfigError:
    return ConfigError(f"rm: there is no {shown(name)} here; `jackfield list` shows what there is")
