"""What `jackfield serve` needs beside the plugin: a server, and the connector's configuration."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def flags() -> Iterator[list[str]]:
    """Flags of `jackfield serve`, while a server is running on a socket of its own."""
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        pytest.skip("neither redis-server nor valkey-server is installed")
    with tempfile.TemporaryDirectory(prefix="jf-redis-") as folder:
        path = Path(folder) / "socket"
        options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", folder]
        with subprocess.Popen([server, *options], stdout=subprocess.DEVNULL) as process:
            try:
                _wait_for(path, process)
                config = {
                    "kv_connector": "redis",
                    "kv_connector_extra_config": {"url": f"unix://{path}"},
                }
                yield ["--kv-transfer-config", json.dumps(config)]
            finally:
                process.kill()


def _wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
            return
        time.sleep(0.01)
    raise RuntimeError("the server did not come up")
