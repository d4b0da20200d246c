"""Chooses the program that assembles kernels for NVIDIA GPUs.

Triton 3.6 and 3.7 assemble for Hopper with ptxas 12.8, which computes descriptors of tensor-core
products from registers that nothing wrote: seen in 14 of 60 variants of the kernels of the gated
delta rule. ptxas 12.9, which Triton ships for Blackwell, is right. TRITON_PTXAS_PATH overrides this
choice.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path
from typing import NamedTuple

import triton

logger = logging.getLogger("jackfield.kernels")

VARIABLE = "TRITON_PTXAS_PATH"
SOUND = (12, 9)
"""First ptxas version that assembles tensor-core products correctly."""


class Assembler(NamedTuple):
    path: str
    version: tuple[int, int]


def driver_version() -> tuple[int, int] | None:
    """Return the CUDA version of the driver, or None without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if not hasattr(driver, "cuDriverGetVersion"):  # A stand-in without functions.
        return None
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10


def shipped_assemblers() -> list[Assembler]:
    """Return the assemblers that Triton ships, the one for Hopper first."""
    try:
        from triton.knobs import NvidiaTool
    except ImportError:
        return []
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    tools = (NvidiaTool.from_path(str(folder / name)) for name in ("ptxas", "ptxas-blackwell"))
    return [Assembler(tool.path, parsed(tool.version)) for tool in tools if tool is not None]


def parsed(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor or 0)


def sound_assembler(assemblers: list[Assembler], driver: tuple[int, int]) -> Assembler | None:
    """Return the one to use in place of the first; None if the first is sound, or if the driver
    loads the code of no sound one.
    """
    if not assemblers or assemblers[0].version >= SOUND:
        return None
    # A driver loads machine code of its own and of earlier major versions.
    fitting = (each for each in assemblers if SOUND <= each.version < (driver[0] + 1, 0))
    return next(fitting, None)


def choose_assembler() -> None:
    """Let Triton use a sound assembler in this process, if there is a GPU to assemble for.

    Failures only warn: this module is imported even where no kernel is compiled.
    """
    try:
        _choose()
    except Exception as error:  # Of Triton's own, and of files that may not be run.
        logger.warning(
            "which ptxas assembles kernels could not be chosen (%s: %s); %s may name one",
            type(error).__name__, error, VARIABLE,
        )  # fmt: skip


def _choose() -> None:
    if os.environ.get(VARIABLE) or (driver := driver_version()) is None:
        return
    assemblers = shipped_assemblers()
    chosen = sound_assembler(assemblers, driver)
    if chosen is not None:
        triton.knobs.nvidia.ptxas = chosen.path
        logger.debug("kernels are assembled by %s", chosen.path)
    elif assemblers and assemblers[0].version < SOUND:
        logger.warning(
            "ptxas %d.%d may assemble tensor-core products wrongly, and the driver (CUDA %d.%d) "
            "loads no code of a later one that Triton brings along; %s may name another",
            *assemblers[0].version, *driver, VARIABLE,
        )  # fmt: skip
