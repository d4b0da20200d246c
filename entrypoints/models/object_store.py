"""Copies of checkpoints from object stores (`s3://`, `gs://` and whatever `fsspec` knows)."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from ...core.errors import CheckpointNotFound, ConfigError, LoadError, shown
from ...core.loading.hub import CHECKPOINT_FILES, TOKENIZER_FILES
from ...core.local_path import local_path

URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<place>.+)")
MANIFEST = ".jackfield.json"
"""File of a copy that says of what it is one."""
CHUNK = 16 << 20
"""Bytes of one request: what a broken connection loses."""
TRIES = 5
"""Requests for a chunk, or copies of a file that turn out wrong."""
AT_ONCE = 4
"""Files fetched in parallel."""
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""Scheme → the package that `fsspec` needs for it."""
PATTERNS = sorted({*CHECKPOINT_FILES, *TOKENIZER_FILES})
SHA256 = "sha256:"
Advance = Callable[[int], Any]


class StoredFile(msgspec.Struct, frozen=True):
    """A file of a store."""

    size: int
    version: str = ""
    """What the store calls its content, its MD5 perhaps, or its SHA-256 after SHA256; "": it calls
    it nothing."""


class Manifest(msgspec.Struct):
    """What a copy has."""

    url: str
    files: dict[str, StoredFile] = {}
    """Relative path → file; those that are whole."""
    complete: bool = False


def is_url(model: str) -> bool:
    """Return whether a model is in an object store."""
    match = URL.fullmatch(model)
    return match is not None and match["scheme"] not in ("hf", "http", "https", "file")


def copies_folder(download_dir: str | None = None) -> Path:
    """Return the folder of all copies."""
    if download_dir is not None:
        return local_path(download_dir) / "jackfield"
    return local_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jackfield/models"


def copy_folder(url: str, download_dir: str | None = None) -> Path:
    """Return the folder of a URL's copy. Raises ConfigError for a URL with `..`."""
    match = URL.fullmatch(url)
    assert match is not None
    place = PurePosixPath(match["place"].strip("/"))
    if ".." in place.parts or not place.parts:
        raise ConfigError(f"model: {shown(url)} is not the address of a folder", param="model")
    return copies_folder(download_dir) / match["scheme"] / place


def read_manifest(folder: Path) -> Manifest | None:
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None


def fetch(url: str, download_dir: str | None = None, *, progress: bool = True) -> Path:
    """Return the folder with a copy of the checkpoint's files; those that changed are fetched.

    With HF_HUB_OFFLINE, a complete copy is taken as it is. Raises ConfigError without the package
    for this scheme, CheckpointNotFound if nothing is there, LoadError for wrong digests.
    """
    from huggingface_hub import constants

    folder = copy_folder(url, download_dir)
    if constants.HF_HUB_OFFLINE:
        manifest = read_manifest(folder)
        if manifest is None or not manifest.complete:
            raise CheckpointNotFound(
                f"model: {shown(url)} has not been fetched, and HF_HUB_OFFLINE is set",
                param="model",
            )
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _update(url, folder, progress)
    return folder


def _update(url: str, folder: Path, progress: bool) -> None:
    from tqdm import tqdm

    system, root = _open(url)
    try:
        stored = _list(system, root)
    except FileNotFoundError:
        stored = {}
    except Exception as error:  # Each package has its own.
        raise CheckpointNotFound(
            f"model: {shown(url)} cannot be read ({type(error).__name__}: {error})", param="model"
        ) from error
    if not stored:
        raise CheckpointNotFound(f"model: there is no checkpoint at {shown(url)}", param="model")
    manifest = read_manifest(folder) or Manifest(url)
    for name in manifest.files.keys() - stored.keys():
        (folder / name).unlink(missing_ok=True)
    manifest.files = {
        name: file
        for name, file in manifest.files.items()
        if stored.get(name) == file and file.version and _has_size(folder / name, file.size)
    }
    manifest.complete = False
    missing = stored.keys() - manifest.files.keys()
    total = sum(stored[name].size for name in missing)
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc=url, disable=not progress or None) as bar,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):

        def copy(name: str) -> str:
            _copy(system, f"{root}/{name}", folder / name, stored[name], bar.update)
            return name

        try:
            for name in pool.map(copy, sorted(missing)):
                manifest.files[name] = stored[name]
                _write(folder, manifest)
        except LoadError:
            raise
        except Exception as error:  # Each package has its own.
            raise LoadError(
                f"{url}: fetching broke off ({type(error).__name__}: {error}); the same command "
                "goes on from there",
                param="model",
            ) from error
    manifest.complete = True
    _write(folder, manifest)


def _open(url: str) -> tuple[Any, str]:
    """Return a file system, and the path in it."""
    import fsspec

    scheme = url.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(url.rstrip("/"))  # type: ignore[no-any-return]
    except ImportError:
        package = PACKAGES.get(scheme, f"the package of fsspec for {scheme}")
        raise ConfigError(
            f"model: {shown(url)} needs a package that is not installed: pip install {package}",
            param="model",
        ) from None
    except ValueError as error:
        raise ConfigError(f"model: {shown(url)}: {error}", param="model") from None


def _list(system: Any, root: str) -> dict[str, StoredFile]:
    """Return the checkpoint's files by relative path."""
    system.invalidate_cache()
    files = {}
    for path, info in system.find(root, detail=True).items():
        name = path.removeprefix(root).lstrip("/")
        if not any(fnmatch(name, pattern) for pattern in PATTERNS):
            continue
        if ".." in PurePosixPath(name).parts:
            raise LoadError(f"model: {shown(path)} would be outside of its copy", param="model")
        version = info.get("ETag") or info.get("md5Hash") or info.get("etag") or ""
        if digest := info.get("sha256"):
            version = f"{SHA256}{digest}"
        files[name] = StoredFile(int(info["size"]), str(version).strip('"'))
    return files


def _copy(system: Any, source: str, target: Path, file: StoredFile, advance: Advance) -> None:
    """Copy a file, going on with a part of the same version. Raises LoadError if its digest is
    wrong each time.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = hashlib.sha256(f"{file.size} {file.version}".encode()).hexdigest()[:16]
    part = target.with_name(f"{target.name}.{mark}.part")
    for old in target.parent.glob(f"{target.name}.*.part"):
        if old != part or not file.version:
            old.unlink()
    for _ in range(2):
        _append(system, source, part, file.size, advance)
        if _is_right(part, file.version):
            part.replace(target)
            return
        advance(-file.size)
        part.unlink()
    raise LoadError(
        f"{source}: what was fetched has another digest than the store says, twice; it was removed",
        param="model",
    )


def _append(system: Any, source: str, part: Path, size: int, advance: Advance) -> None:
    """Fetch what a part lacks, by chunks. Raises what the store raises TRIES times in a row."""
    with part.open("ab") as out:
        if out.tell() > size:
            out.truncate(0)
        position = out.tell()
        advance(position)
        failures = 0
        while position < size:
            try:
                chunk = system.cat_file(source, start=position, end=min(position + CHUNK, size))
                if not chunk:
                    raise EOFError(f"it ends at {position} bytes of {size}")
            except FileNotFoundError:
                raise
            except Exception:
                failures += 1
                if failures == TRIES:
                    raise
                continue
            failures = 0
            out.write(chunk)
            out.flush()
            position += len(chunk)
            advance(len(chunk))


def _is_right(path: Path, version: str) -> bool:
    """Return whether a file has the digest that its version is; True for other versions."""
    digest = hashlib.md5(usedforsecurity=False)
    if re.fullmatch("[0-9a-f]{32}", version):
        expected = bytes.fromhex(version)
    elif re.fullmatch("[A-Za-z0-9+/]{22}==", version):
        expected = base64.b64decode(version)
    elif re.fullmatch(f"{SHA256}[0-9a-f]{{64}}", version):
        expected, digest = bytes.fromhex(version.removeprefix(SHA256)), hashlib.sha256()
    else:
        return True
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.digest() == expected


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _write(folder: Path, manifest: Manifest) -> None:
    new = folder / f"{MANIFEST}.new"
    new.write_bytes(msgspec.json.encode(manifest))
    new.replace(folder / MANIFEST)
