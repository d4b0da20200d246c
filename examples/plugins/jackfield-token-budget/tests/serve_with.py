"""What `jackfield serve` needs beside the plugin: the part's name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def flags() -> Iterator[list[str]]:
    """Flags of `jackfield serve`."""
    yield ["--parts", '{"token_budget": {}}']
