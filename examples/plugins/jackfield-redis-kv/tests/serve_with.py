"""What `jackfield serve` needs beside the plugin: a server, and the connector's configuration."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

IN_PYTHON = (sys.executable, str(Path(__file__).with_name("resp_server.py")))
"""The server of these tests, which is there on every machine."""


@contextlib.contextmanager
def started(
    command: Sequence[str] = IN_PYTHON, option: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a socket of its own. → (process, its URL)

    `option`, if any, stands before the socket's path.
    """
    # The path of a socket is at most some 100 characters long, a test's own folder is longer.
    with tempfile.TemporaryDirectory(prefix="jf-redis-") as folder:
        path = Path(folder) / "socket"
        argv = [*command, *option, str(path)]
        with subprocess.Popen(argv, cwd=folder, text=True, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                if not any("Ready to accept connections" in line for line in process.stdout):
                    raise RuntimeError(f"{argv[0]} ended with status {process.wait()}")
                yield process, f"unix://{path}"
            finally:
                process.kill()


@contextlib.contextmanager
def flags() -> Iterator[list[str]]:
    """Flags of `jackfield serve`, while a server is running."""
    with started() as (_, url):
        config = {"kv_connector": "redis", "kv_connector_extra_config": {"url": url}}
        yield ["--kv-transfer-config", json.dumps(config)]
