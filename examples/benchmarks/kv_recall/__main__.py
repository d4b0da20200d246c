"""`python -m jackfield.examples.benchmarks.kv_recall`."""

from __future__ import annotations

import sys

from jackfield.core.errors import ConfigError
from jackfield.entrypoints.flags.engine_flags import fail

from .command import run

if __name__ == "__main__":
    try:
        status = run(sys.argv[1:])
    except ConfigError as error:
        status = fail(error)
    raise SystemExit(status)
