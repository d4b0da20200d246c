"""A hub and an object store on this machine, which can break off and lie."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

COMMIT = "1234567890123456789012345678901234567890"
OTHER = "abcdefabcdefabcdefabcdefabcdefabcdefabcd"
REPO = "owner/name"
FALSE = bytes(byte ^ 1 for byte in range(256))
"""A table of other bytes."""


class Stored:
    """Files of a server, what it did, and what it does wrong."""

    def __init__(self, folder: Path) -> None:
        self.files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.iterdir())
            if path.is_file()
        }
        self.requests: list[tuple[str, str, str]] = []
        """(method, path, Range) in order."""
        self.headers: list[dict[str, str]] = []
        self.break_after: dict[str, list[int]] = {}
        """File → bytes after which each of the next answers breaks off."""
        self.lies: dict[str, int] = {}
        """File → answers that have another content of the same size."""
        self.token: str | None = None
        self.url = ""

    def fetched(self, name: str) -> list[str]:
        """Ranges of the requests for a file's content."""
        gets = ((path, range) for method, path, range in self.requests if method == "GET")
        return [range for path, range in gets if path.endswith(name)]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stored: Stored

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.stored.requests.append((self.command, path, self.headers.get("Range", "")))
        self.stored.headers.append(dict(self.headers))
        try:
            self.answer(path, parse_qs(urlsplit(self.path).query))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def answer(self, path: str, query: dict[str, list[str]]) -> None:
        raise NotImplementedError

    def send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_file(self, name: str, **headers: str) -> None:
        """Send a file or its range, rightly or not."""
        stored = self.stored
        data = stored.files[name]
        if self.command == "GET" and stored.lies.get(name, 0):
            stored.lies[name] -= 1
            data = data.translate(FALSE)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status, size = 200, len(data)
        if asked is not None:
            start, end = int(asked[1]), int(asked[2] or size - 1)
            data, status = data[start : end + 1], 206
            headers["Content_Range"] = f"bytes {start}-{start + len(data) - 1}/{size}"
        breaks = stored.break_after.get(name)
        if self.command == "GET" and breaks:
            self.send_response(status)
            for header, value in headers.items():
                self.send_header(header.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: breaks.pop(0)])
            self.close_connection = True
            return
        self.send(status, data, **headers)


class Hub(Handler):
    """The parts of the hub's API that huggingface_hub uses for a snapshot."""

    def answer(self, path: str, query: dict[str, list[str]]) -> None:
        stored = self.stored
        if stored.token is not None and self.headers.get("Authorization") != (
            f"Bearer {stored.token}"
        ):
            self.send(401, b"{}", X_Error_Code="GatedRepo", X_Error_Message="a token is needed")
            return
        if match := re.fullmatch(rf"/api/models/{REPO}(/revision/(?P<revision>.+))?", path):
            commit = self.commit_of(match["revision"] or "main")
            if commit is None:
                self.send(404, b"{}", X_Error_Code="RevisionNotFound")
                return
            siblings = [{"rfilename": name} for name in stored.files]
            body = {"id": REPO, "sha": commit, "siblings": siblings}
            self.send(200, json.dumps(body).encode(), Content_Type="application/json")
        elif re.fullmatch(rf"/api/models/{REPO}/tree/({COMMIT}|{OTHER})", path):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": COMMIT}
                for name, data in stored.files.items()
            ]
            self.send(200, json.dumps(entries).encode(), Content_Type="application/json")
        elif match := re.fullmatch(rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", path):
            commit = self.commit_of(match["revision"])
            if commit is None or match["name"] not in stored.files:
                self.send(404, b"", X_Error_Code="EntryNotFound")
                return
            data = stored.files[match["name"]]
            facts = {"X_Repo_Commit": commit}
            if match["name"].endswith(".safetensors"):
                digest = hashlib.sha256(data).hexdigest()
                facts |= {"X_Linked_Etag": f'"{digest}"', "X_Linked_Size": str(len(data))}
            else:
                digest = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            self.send_file(match["name"], ETag=f'"{digest}"', **facts)
        else:
            self.send(404, b"{}", X_Error_Code="RepoNotFound")

    def commit_of(self, revision: str) -> str | None:
        return {"main": COMMIT, "v2": OTHER, COMMIT: COMMIT, OTHER: OTHER}.get(revision)


class S3(Handler):
    """Lists a bucket and sends its objects."""

    def answer(self, path: str, query: dict[str, list[str]]) -> None:
        stored = self.stored
        name = path.removeprefix("/bucket").lstrip("/").removeprefix("models/tiny").lstrip("/")
        if "list-type" in query:
            prefix = query.get("prefix", [""])[0].removeprefix("models/tiny").lstrip("/")
            entries = "".join(
                f"<Contents><Key>models/tiny/{escape(key)}</Key><Size>{len(data)}</Size>"
                f"<ETag>&quot;{hashlib.md5(data).hexdigest()}&quot;</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                for key, data in stored.files.items()
                if key.startswith(prefix) and path.startswith("/bucket")
            )
            xml = (
                '<?xml version="1.0"?><ListBucketResult><Name>bucket</Name><IsTruncated>false'
                f"</IsTruncated>{entries}</ListBucketResult>"
            )
            self.send(200, xml.encode(), Content_Type="application/xml")
        elif name in stored.files:
            digest = hashlib.md5(stored.files[name]).hexdigest()
            modified = "Thu, 01 Jan 2026 00:00:00 GMT"
            self.send_file(name, ETag=f'"{digest}"', Last_Modified=modified)
        else:
            self.send(404, b"<Error><Code>NoSuchKey</Code></Error>", Content_Type="application/xml")


class ModelScope(Handler):
    """Lists a model of ModelScope and sends its files."""

    def answer(self, path: str, query: dict[str, list[str]]) -> None:
        stored = self.stored
        place = f"/api/v1/models/{REPO}/repo"
        allowed = stored.token in (None, self.headers.get("Authorization", "").partition(" ")[2])
        if query.get("Revision") not in (["master"], ["v2"]) or not allowed:
            self.send(404, b"{}")
        elif path == f"{place}/files" and query.get("Recursive") == ["True"]:
            files: list[dict[str, Any]] = [
                {
                    "Path": name, "Name": name, "Type": "blob", "Size": len(data),
                    "Sha256": hashlib.sha256(data).hexdigest(),
                }
                for name, data in stored.files.items()
            ]  # fmt: skip
            files.append({"Path": "figures", "Name": "figures", "Type": "tree", "Size": 0})
            body = {"Code": 200, "Success": True, "Data": {"Files": files}}
            self.send(200, json.dumps(body).encode(), Content_Type="application/json")
        elif path == place and query["FilePath"][0] in stored.files:
            self.send_file(query["FilePath"][0])
        else:
            self.send(404, b"{}")


@contextlib.contextmanager
def served(kind: type[Handler], folder: Path) -> Iterator[Stored]:
    """Serve a folder's files on a free port."""
    stored = Stored(folder)
    handler = type(kind.__name__, (kind,), {"stored": stored})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    stored.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield stored
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)
