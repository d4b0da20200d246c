"""Runs in a Ray process as one of several engines.

Imports nothing large before the environment is complete.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Mapping
from typing import Any

from .cluster import Placement


class EngineActor:
    """An actor with an engine and its rank 0."""

    def run(
        self,
        address: tuple[str, int],
        secret: bytes,
        number: int,
        environment: Mapping[str, str],
        group: Any,
    ) -> None:
        """Serve requests until the first process closes the connection, or the engine dies.
        `address`: of the first process; `group`: Ray's placement group for the ranks.
        """
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        from ....core.data_parallel.member_program import run_member
        from ..connections import connect

        Placement.given = group
        run_member(connect(address, secret, number))

    def dump_stacks(self) -> None:
        faulthandler.dump_traceback(file=2)
