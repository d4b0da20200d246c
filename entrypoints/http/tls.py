"""TLS certificate, trusted clients, and reload without a restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from ...core.errors import ConfigError
from ..flags.dataclass_flags import Flag

logger = logging.getLogger("jackfield.server")
REFRESH_SECONDS = 5.0
"""Seconds between checks of the files."""


@dataclass(frozen=True)
class Tls:
    """Files in PEM format, and what is required of clients."""

    ssl_certfile: Annotated[
        str, Meta(description="certificate (PEM): serve HTTPS"), Flag(group="TLS", metavar="PATH")
    ]
    ssl_keyfile: Annotated[
        str | None,
        Meta(description="its key, if not in the same file"),
        Flag(group="TLS", metavar="PATH"),
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        Meta(description="whose clients' certificates to trust"),
        Flag(group="TLS", metavar="PATH"),
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        Meta(description="clients' certificates: 0 none, 1 checked if there is one, 2 required"),
        Flag(group="TLS", metavar="N"),
    ] = int(ssl.CERT_NONE)
    ssl_ciphers: Annotated[
        str | None,
        Meta(description="OpenSSL's list, for TLS 1.2"),
        Flag(group="TLS", metavar="LIST"),
    ] = None
    """TLS 1.3 has its own list."""
    refresh: Annotated[
        bool,
        Meta(description="load the files again when they change"),
        Flag("--enable-ssl-refresh", group="TLS"),
    ] = False

    def context(self) -> ssl.SSLContext:
        """Return the context. Raises ConfigError with the option's name."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.load(context)
        if self.ssl_ciphers is not None:
            try:
                context.set_ciphers(self.ssl_ciphers)
            except ssl.SSLError:
                raise _wrong("ssl_ciphers", f"{self.ssl_ciphers!r} names no cipher") from None
        try:
            context.verify_mode = ssl.VerifyMode(self.ssl_cert_reqs)
        except ValueError:
            raise _wrong("ssl_cert_reqs", f"must be 0, 1 or 2, got {self.ssl_cert_reqs}") from None
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise _wrong("ssl_cert_reqs", "needs --ssl-ca-certs, to check clients against")
        return context

    def load(self, context: ssl.SSLContext) -> None:
        """Load the files, for new connections."""
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise _wrong(name, f"no such file: {path}")
        try:
            # With an empty password, an encrypted key is refused instead of asking on a terminal.
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            raise _wrong(
                "ssl_keyfile" if self.ssl_keyfile else "ssl_certfile",
                f"no certificate with its key, in PEM without a password ({error})",
            ) from None
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except (ssl.SSLError, OSError) as error:
                raise _wrong("ssl_ca_certs", f"no certificates in it ({error})") from None

    def times(self) -> tuple[int, ...]:
        """Return modification times; empty while a file is missing."""
        try:
            paths = (self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
            return tuple(Path(path).stat().st_mtime_ns for path in paths if path is not None)
        except OSError:
            return ()


@contextlib.asynccontextmanager
async def refreshing(
    tls: Tls, context: ssl.SSLContext, seconds: float = REFRESH_SECONDS
) -> AsyncIterator[None]:
    """Load changed files into `context` while this runs; log inconsistent files and keep the
    previous ones.
    """

    async def watch() -> None:
        last = tls.times()
        while True:
            await asyncio.sleep(seconds)
            now = tls.times()
            if now in (last, ()):
                continue
            try:
                Tls.context(tls)  # Checked first: a key that does not match would break `context`.
                tls.load(context)
            except ConfigError as error:
                logger.warning("the new certificate is not used: %s", error)
            else:
                logger.info("a new certificate is in use")
            last = now

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _wrong(name: str, what: str) -> ConfigError:
    return ConfigError(f"--{name.replace('_', '-')}: {what}", param=name)
