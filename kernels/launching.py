"""Programmatic dependent launch: a kernel may start while the one before it drains.

A kernel launched this way calls `gdc_wait` before it reads what earlier kernels write, and before
it writes anything; so all of a chain is ordered as without it. When
it calls `gdc_launch_dependents` decides how early the next one may come: with its first loads under
way, or only taking up room while it waits. That is measured, kernel by kernel.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton

if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def gdc_wait():
        """Nothing to wait for in the interpreter."""

    @triton.jit
    def gdc_launch_dependents():
        """Nobody to launch in the interpreter."""

else:
    from triton.language.extra.cuda import (  # type: ignore[no-redef]
        gdc_launch_dependents,
        gdc_wait,
    )


@functools.cache
def _supported(index: int) -> bool:
    major, _ = torch.cuda.get_device_capability(index)
    return major >= 9 and os.environ.get("JACKFIELD_PDL", "1") != "0"


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch options; empty where the device cannot. JACKFIELD_PDL=0 turns it off."""
    if device.type != "cuda" or not _supported(device.index or 0):
        return {}
    return {"launch_pdl": True}


__all__ = ["gdc_launch_dependents", "gdc_wait", "pdl_options"]
