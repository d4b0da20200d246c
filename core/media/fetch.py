"""Reads items from URLs: data:, and if the configuration allows it file:, http: and https:."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote_to_bytes

from ..errors import InvalidRequest, shown

if TYPE_CHECKING:
    from yarl import URL

B = TypeVar("B", bytes, bytearray)
MAX_BYTES = 64 << 20
"""Most bytes of an encoded item."""
SECONDS = 20.0
"""For one item, redirects included."""
REDIRECTS = 3
FETCHES = 8
"""URLs that are fetched at once, and as many files that are read, per engine."""
ANY = "*"
"""In the list of hosts: all."""
LARGE = 1 << 20
"""Bytes that are decoded or hashed on a thread, not on the event loop."""
_CHUNK = 1 << 16
_TEXT = 1 << 20
"""Characters of base64 that are decoded at once; other threads run in between."""
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that stand for those of IPv4."""


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1]
        if inner is None and ip in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast


class MediaFetcher:
    """Reads items within bounds. Nothing is read unless the configuration allows it."""

    def __init__(
        self,
        local_path: str,
        domains: Sequence[str],
        *,
        allows: Callable[[str], bool] = is_public,
    ) -> None:
        """local_path: folder of file: URLs; "": none. domains: hosts, or ANY. allows: addresses
        that may be connected to."""
        self._folder = Path(local_path).resolve() if local_path else None
        self._domains = frozenset(map(_normal_host, domains))
        self._allows = allows
        # Two: files do not wait for slow hosts.
        self._fetching, self._reading = asyncio.Semaphore(FETCHES), asyncio.Semaphore(FETCHES)

    async def read(self, url: str, field: str, modality: str = "image") -> bytes:
        """Return what a URL names. Raises InvalidRequest."""
        scheme = url[:6].partition(":")[0].lower()
        if scheme == "data":
            if len(url) < LARGE:
                return _data(url, field, modality)
            return await asyncio.to_thread(_data, url, field, modality)
        if scheme == "file":
            async with self._reading:
                return await asyncio.to_thread(self._file, url, field)
        if scheme in ("http", "https"):
            try:
                async with self._fetching, asyncio.timeout(SECONDS):
                    return await self._fetch(url, field, modality)
            except TimeoutError:
                raise InvalidRequest(
                    f"{field}: was not there within {SECONDS:g} seconds", param=field
                ) from None
        raise InvalidRequest(
            f"{field}: must be a URL that begins with data:, https:, http: or file:, got "
            f"{shown(url)}",
            param=field,
        )

    # ------------------------------------------------------------ files

    def _file(self, url: str, field: str) -> bytes:
        if self._folder is None:
            raise InvalidRequest(
                f"{field}: this server reads no files; send a data: URL, or start it with "
                "--allowed-local-media-path",
                param=field,
            )
        refused = InvalidRequest(
            f"{field}: is no readable file below the folder of --allowed-local-media-path",
            param=field,
        )
        rest = url[5:]
        if rest.startswith("//"):
            host, slash, rest = rest[2:].partition("/")
            if host not in ("", "localhost"):
                raise refused
            rest = slash + rest
        try:
            path = Path(os.fsdecode(unquote_to_bytes(rest))).resolve()
            if not path.is_relative_to(self._folder):
                raise refused
            # What is opened is what was checked: resolved, and not a link by now.
            number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError, RuntimeError):
            raise refused from None
        try:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise refused
            with os.fdopen(number, "rb", closefd=False) as file:
                data = file.read(MAX_BYTES + 1)
        finally:
            os.close(number)
        return _bounded(data, field)

    # ------------------------------------------------------------ HTTP

    async def _fetch(self, url: str, field: str, modality: str) -> bytes:
        import aiohttp
        from yarl import URL

        if not self._domains:
            raise InvalidRequest(
                f"{field}: this server fetches nothing; send a data: URL, or start it with "
                "--allowed-media-domains",
                param=field,
            )
        connector = aiohttp.TCPConnector(
            resolver=_Resolver(self._allows, field),  # type: ignore[arg-type]  # By shape.
            use_dns_cache=False,
            force_close=True,
        )
        headers = {"Accept": f"{modality}/*", "Accept-Encoding": "identity"}
        try:
            target = URL(url)
            async with aiohttp.ClientSession(
                connector=connector, trust_env=False, auto_decompress=False, headers=headers,
                cookie_jar=aiohttp.DummyCookieJar(),
            ) as session:  # fmt: skip
                for _ in range(REDIRECTS + 1):
                    self._check(target, field)
                    async with session.get(target, allow_redirects=False) as response:
                        if response.status in (301, 302, 303, 307, 308):
                            target = target.join(URL(response.headers.get("Location", "")))
                            continue
                        if response.status != 200:
                            raise InvalidRequest(
                                f"{field}: the host answered with status {response.status}",
                                param=field,
                            )
                        data = bytearray()
                        async for chunk in response.content.iter_chunked(_CHUNK):
                            data += chunk
                            _bounded(data, field)
                        return bytes(data)
        except (aiohttp.ClientError, ValueError, OSError) as error:
            if isinstance(error.__context__, InvalidRequest):
                raise error.__context__ from None
            raise InvalidRequest(
                f"{field}: cannot be fetched ({type(error).__name__})", param=field
            ) from None
        raise InvalidRequest(f"{field}: more than {REDIRECTS} redirects", param=field)

    def _check(self, url: URL, field: str) -> None:
        """Raise InvalidRequest unless a URL may be fetched; of each hop."""
        host = url.host
        if url.scheme not in ("http", "https") or not host or url.user is not None:
            raise InvalidRequest(
                f"{field}: must be a plain http: or https: URL, also after redirects", param=field
            )
        if ANY not in self._domains and _normal_host(host) not in self._domains:
            raise InvalidRequest(
                f"{field}: the host {shown(host)} is not among --allowed-media-domains", param=field
            )
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return  # A name: the resolver checks its addresses.
        _check_address(host, self._allows, field)


class _Resolver:
    """Resolves names to addresses that may be connected to, and no others: a connection is made to
    the address that was checked."""

    def __init__(self, allows: Callable[[str], bool], field: str) -> None:
        self._allows, self._field = allows, field

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[Any]:
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(
            host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
        for info in infos:
            _check_address(str(info[4][0]), self._allows, self._field)
        return [
            {
                "hostname": host, "host": address[0], "port": port, "family": kind,
                "proto": protocol, "flags": socket.AI_NUMERICHOST,
            }
            for kind, _, protocol, _, address in infos
        ]  # fmt: skip

    async def close(self) -> None:
        """Do nothing."""


def _check_address(address: str, allows: Callable[[str], bool], field: str) -> None:
    if not allows(address):
        raise InvalidRequest(f"{field}: the host's address is not public", param=field)


def _normal_host(host: str) -> str:
    """Return a host's name as names are compared."""
    host = host.strip().strip("[]").rstrip(".").lower()
    try:
        return host.encode("idna").decode() if not host.isascii() else host
    except UnicodeError:
        return host


# ---------------------------------------------------------------- data


def _data(url: str, field: str, modality: str) -> bytes:
    """Return the content of a data: URL. Raises InvalidRequest."""
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequest(
            f"{field}: a data: URL must be data:{modality}/…;base64,…", param=field
        )
    if len(text) > MAX_BYTES // 3 * 4 + 4:
        raise _too_long(field)
    try:
        return _bounded(decode_base64(text), field)
    except ValueError:
        raise InvalidRequest(f"{field}: is not base64", param=field) from None


def decode_base64(text: str) -> bytes:
    """Return the bytes of a text, however long, and let other threads run meanwhile. Raises
    ValueError."""
    pieces = [
        base64.b64decode(text[start : start + _TEXT], validate=True)
        for start in range(0, len(text), _TEXT)
    ]
    # A piece that ends with padding must be the last.
    if any(len(piece) < _TEXT // 4 * 3 for piece in pieces[:-1]):
        raise ValueError("padding within the text")
    return b"".join(pieces)


def _bounded(data: B, field: str) -> B:
    if len(data) > MAX_BYTES:
        raise _too_long(field)
    return data


def _too_long(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: more than {MAX_BYTES >> 20} MiB", param=field)
