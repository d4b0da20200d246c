"""The program of a member's process. Imports nothing large before it leaves signals to its
parent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys

from ..remote.processes import follow_parent


def main() -> int:
    connection_number, parent = map(int, sys.argv[1:])
    if not follow_parent(parent):
        return 1
    return run_member(socket.socket(fileno=connection_number))


def run_member(connection: socket.socket) -> int:
    from .member_engine import serve  # Torch, while the first frame is on its way.
    from .setup import receive_setup

    try:
        setup = receive_setup(connection)
    except EOFError:
        return 1
    os.environ.update(setup.environment)
    logging.basicConfig(
        level=setup.log_level,
        format=f"%(asctime)s %(levelname)s %(name)s: member {setup.member}: %(message)s",
    )
    run = asyncio.run
    try:
        import uvloop
    except ImportError:
        pass
    else:
        run = uvloop.run
    return run(serve(setup, connection))


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # Libraries take long to unload, and nothing of this process is left to keep.
