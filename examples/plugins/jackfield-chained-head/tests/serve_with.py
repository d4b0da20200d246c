"""What `jackfield serve` needs beside the plugin: the head's folder."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


@contextlib.contextmanager
def flags() -> Iterator[list[str]]:
    """Flags of `jackfield serve`, while the folder is there."""
    from heads import write_head

    with tempfile.TemporaryDirectory() as folder:
        config = {"model": str(write_head(Path(folder))), "num_speculative_tokens": 3}
        yield ["--speculative-config", json.dumps(config)]
