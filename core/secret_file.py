"""Secrets that several processes share, in files."""

from __future__ import annotations

from .local_path import local_path

MIN_SECRET = 16
"""Fewest bytes of a secret."""


def read_secret(path: str) -> bytes:
    """Return a file's secret, without white space around it. Raises ValueError."""
    try:
        secret = local_path(path).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"{path!r} cannot be read: {error}") from error
    if len(secret) < MIN_SECRET:
        raise ValueError(
            f"{path!r} has a secret of {len(secret)} bytes, of at least {MIN_SECRET}; make one "
            "with: openssl rand -hex 32"
        )
    return secret
