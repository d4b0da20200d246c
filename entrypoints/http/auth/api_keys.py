"""API keys from flags, the environment and files, with names and limits."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from ....core.errors import AuthenticationFailed, ConfigError
from ....core.tenancy import RequestHead, Tenant, TenantLimits

logger = logging.getLogger("jackfield.server")
PREFIX = "sha256:"


class KeyEntry(
    TenantLimits, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    """Owner's name. Keys of the same name (old and new) have the same owner."""
    digest: str
    """`sha256:` and the key's hexadecimal digest."""


class ApiKey(msgspec.Struct, frozen=True):
    digest: bytes
    tenant: Tenant


def digest_of(key: str) -> bytes:
    """Return the key's digest, for comparisons of equal length. Non-UTF-8 header bytes arrive as
    surrogates.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def plain_key(key: str) -> ApiKey:
    """Return a key without a name, owned by its digest. Its owner may do what the server allows."""
    digest = digest_of(key)
    limits = TenantLimits(manages_adapters=True, manages_engine=True)
    return ApiKey(digest, Tenant(f"key-{digest.hex()[:8]}", _owner("key", digest.hex()), limits))


def named_key(entry: KeyEntry) -> ApiKey:
    """Return a key owned by its name, so that it can be replaced."""
    limits = {field: getattr(entry, field) for field in TenantLimits.__struct_fields__}
    tenant = Tenant(entry.name, _owner("name", entry.name), TenantLimits(**limits))
    return ApiKey(bytes.fromhex(entry.digest.removeprefix(PREFIX)), tenant)


def _owner(kind: str, text: str) -> str:
    return hashlib.blake2b(f"{kind}:{text}".encode(), digest_size=16).hexdigest()


def read_keys(path: Path) -> list[ApiKey]:
    """Read a key file: each line is a KeyEntry as JSON or a plain key; `#` begins a comment.

    Raises ConfigError with the line.
    """
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: {path}: {error}", param="api_key_file") from None
    keys = [
        _read(line, f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        if line and not line.startswith("#")
    ]
    if not keys:
        raise ConfigError(f"--api-key-file: no key in {path}", param="api_key_file")
    return keys


def _read(line: str, where: str) -> ApiKey:
    if not line.startswith("{"):
        return plain_key(line)
    try:
        entry = msgspec.json.decode(line, type=KeyEntry)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--api-key-file: {where}: {error}", param="api_key_file") from None
    if not re.fullmatch(f"{PREFIX}[0-9a-f]{{64}}", entry.digest):
        raise ConfigError(
            f"--api-key-file: {where}: digest: must be {PREFIX} and 64 hexadecimal digits "
            "(jackfield keys)",
            param="api_key_file",
        )
    return named_key(entry)


class KeyRing:
    """A server's keys, consulted before the plugins' `authenticate`."""

    def __init__(self, keys: Iterable[str], files: Iterable[Path] = ()) -> None:
        """Raises ConfigError for a bad file."""
        self._plain = [plain_key(key) for key in keys]
        self._files = tuple(files)
        self._keys: list[ApiKey] = []
        self.load()

    def __len__(self) -> int:
        return len(self._keys)

    def load(self) -> None:
        """Read the files; on ConfigError the previous keys stay."""
        read = [key for path in self._files for key in read_keys(path)]
        self._keys = [*self._plain, *read]

    def reload(self) -> None:
        """Read the files again; errors are logged, and the previous keys stay."""
        try:
            self.load()
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.info("%d API keys were read again", len(self))

    def authenticate(self, request: RequestHead) -> Tenant | None:
        """Return the tenant of the request's key. All keys are compared, each in constant time."""
        digest = digest_of(request.key or "")
        matches = [key for key in self._keys if hmac.compare_digest(digest, key.digest)]
        return matches[0].tenant if matches and request.key is not None else None

    @staticmethod
    def refusal() -> AuthenticationFailed:
        return AuthenticationFailed(
            "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
        )
