"""`python -m jackfield`: the `jackfield` command."""

from __future__ import annotations

from .entrypoints.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
