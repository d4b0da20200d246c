"""Programmatic dependent launch: a kernel may start while the one before it drains.

A kernel launched this way calls `gdc_wait` before it reads the output of earlier kernels, and
before it writes anything, so all kernels of a chain are ordered as without it. The point at which
it calls `gdc_launch_dependents` decides how early the next kernel may start. The point is measured
for each kernel.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton

if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def gdc_wait():
        """Do nothing: the interpreter runs kernels one after another."""

    @triton.jit
    def gdc_launch_dependents():
        """Do nothing: the interpreter runs kernels one after another."""

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
    """Return launch options; empty if the device does not support it or JACKFIELD_PDL=0."""
    if device.type != "cuda" or not _supported(device.index or 0):
        return {}
    return {"launch_pdl": True}


__all__ = ["gdc_launch_dependents", "gdc_wait", "pdl_options"]
