"""Commands' standard output, whose reader may leave, or whose file may be full."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
from collections.abc import Callable

READER_LEFT = 128 + signal.SIGPIPE
"""Exit status when the reader has left, as in a shell."""
INTERRUPTED = 128 + signal.SIGINT
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def run_command(command: Callable[[], int]) -> int:
    """Run a command; return its exit status.

    Silent if the output's reader has left (`jackfield plugins | head`), and at an unhandled Ctrl-C.
    """
    if sys.stdout is None:  # Closed by the shell (`>&-`): the next file would become descriptor 1.
        sys.stdout = open(os.devnull, "w")
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not reader_left():
            raise
        _discard()
        return READER_LEFT
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        _discard()
        print(f"jackfield: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def announce(line: str) -> None:
    """Print a server's line; the server continues if it cannot be read."""
    try:
        print(line, flush=True)
    except OSError:
        _discard()


def reader_left() -> bool:
    """Return whether standard output is a pipe without a reader."""
    try:
        poll = select.poll()
        poll.register(sys.stdout, 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))
    except (OSError, ValueError):
        return False


def _discard() -> None:
    """Discard pending and later output, which Python would retry at exit."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
