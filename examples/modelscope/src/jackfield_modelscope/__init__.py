"""ModelScope's models as a read-only file system of fsspec: modelscope://owner/name[@revision]."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, urlencode

from fsspec import AbstractFileSystem

ROOT = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+?))?(?:/(?P<file>.+))?")
MOST_FILES = 3000
"""A listing of so many files may lack some: the service cuts it there."""
TIMEOUT_SECONDS = 30.0


class ModelScopeFileSystem(AbstractFileSystem):  # type: ignore[misc]
    protocol = "modelscope"
    cachable = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        endpoint = os.environ.get("MODELSCOPE_ENDPOINT") or "https://modelscope.cn"
        self._endpoint = endpoint.rstrip("/")
        self._token = os.environ.get("MODELSCOPE_API_TOKEN", "")

    def invalidate_cache(self, path: str | None = None) -> None:
        """Do nothing: no listing is kept."""

    def find(self, path: str, detail: bool = False, **_: Any) -> Any:
        """Return a model's files. Raises FileNotFoundError if there is no such model."""
        repo, revision, _ = self._parts(path)
        query = urlencode({"Revision": revision, "Recursive": "True"})
        answer = json.loads(self._get(f"{repo}/repo/files?{query}"))
        files = answer["Data"]["Files"]
        if len(files) >= MOST_FILES:
            raise OSError(f"{repo} has {MOST_FILES} files or more, which cannot be listed")
        found = {
            f"{path}/{file['Path']}": {
                "name": f"{path}/{file['Path']}",
                "type": "file",
                "size": file["Size"],
                "sha256": file.get("Sha256") or "",
            }
            for file in files
            if file["Type"] != "tree"
        }
        return found if detail else sorted(found)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Return a file's bytes from start up to end."""
        repo, revision, file = self._parts(path)
        query = urlencode({"Revision": revision, "FilePath": file}, quote_via=quote)
        headers = {}
        if start is not None or end is not None:
            headers["Range"] = f"bytes={start or 0}-{'' if end is None else end - 1}"
        return self._get(f"{repo}/repo?{query}", headers)

    def _parts(self, path: str) -> tuple[str, str, str]:
        match = ROOT.fullmatch(self._strip_protocol(path))
        if match is None:
            raise FileNotFoundError(f"{path} is not owner/name of a model")
        return match["repo"], match["revision"] or "master", match["file"] or ""

    def _get(self, place: str, headers: dict[str, str] | None = None) -> bytes:
        url = f"{self._endpoint}/api/v1/models/{place}"
        request = urllib.request.Request(url, headers=headers or {})
        if self._token:  # For this host alone: large files are elsewhere.
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise FileNotFoundError(place) from None
            raise OSError(f"{place}: HTTP {error.code}") from None
