"""Compile first, launch later: a step is gone through once, and its kernels compile side by side.

Triton compiles a kernel when it is first launched, one after the other. In a `Rehearsal` a launch
only asks for its compilation, on one of several threads (the compiler releases the interpreter lock
in nearly all that it does, and assembles in a process of its own); nothing runs, so what a kernel
would have written is whatever the memory held.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
import triton
import triton.language as tl

try:
    from triton.runtime._async_compile import AsyncCompileMode
except ImportError:  # A Triton that cannot: kernels compile when they are launched.
    AsyncCompileMode = None

try:
    from triton.runtime import build as triton_build
except ImportError:  # Another Triton, which may load in another way.
    triton_build = None

logger = logging.getLogger("jackfield.kernels")

MAX_THREADS = 16
CACHED_SECONDS = 0.1
"""Loading compiled kernels takes a few milliseconds each, compiling one 0.2 s and more."""

_rehearsing = contextvars.ContextVar("rehearsing", default=False)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, which in a rehearsal only compiles."""
    if _rehearsing.get():
        return functools.partial(kernel.run, grid=grid, warmup=True)
    launcher: Callable[..., Any] = kernel[grid]
    return launcher


@triton.jit
def _smallest_kernel(out_ptr):
    tl.store(out_ptr, 0)


def load_compiler() -> None:
    """Have Triton get ready, for which the first kernel would wait.

    It takes a hash of itself (some 460 MB), asks its assembler for the version and, where its cache
    is new, runs a C compiler for its driver.
    """
    _ = _smallest_kernel.warmup(torch.int32, grid=(1,)).run


def can_rehearse() -> bool:
    """Not in the interpreter, which compiles nothing."""
    return AsyncCompileMode is not None and os.environ.get("TRITON_INTERPRET") != "1"


_loading = threading.RLock()


def load_one_at_a_time(build: Any) -> None:
    """Let Triton load launchers one after the other, whichever thread asks.

    `build`: the module `triton.runtime.build`. All launchers are extension modules of one name, and
    CPython keeps the functions of a loaded one under that name in `sys.modules`: of two threads
    that load at the same time one can end with the other's launcher ("function takes exactly 21
    arguments (29 given)", Triton 3.6, CPython 3.12).
    """
    load = getattr(build, "_load_module_from_path", None)
    if load is None or getattr(load, "one_at_a_time", False):
        return

    @functools.wraps(load)
    def locked(*args: Any, **options: Any) -> Any:
        with _loading:
            return load(*args, **options)

    locked.one_at_a_time = True  # type: ignore[attr-defined]
    build._load_module_from_path = locked


class _Loads:
    """Counts kernels that Triton has loaded onto a device, compiled just before or not."""

    def __init__(self) -> None:
        self.count = 0
        with contextlib.suppress(AttributeError):
            triton.knobs.runtime.kernel_load_end_hook.add(self._loaded)

    def _loaded(self, *args: Any, **options: Any) -> None:
        self.count += 1


_loads = _Loads()


def num_loaded() -> int:
    """Kernels loaded in this process so far; 0 where Triton does not tell."""
    return _loads.count


if triton_build is not None:
    load_one_at_a_time(triton_build)


class Rehearsal:
    """A context for one thread; leaving it waits for what is still being compiled.

    A compilation that fails is tried again in place, and fails where its kernel is
    launched. Kernels that are launched without `launch` run as ever, when they are compiled.
    """

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        self._device = device
        self._threads = threads or min(MAX_THREADS, _cores())

    def __enter__(self) -> Rehearsal:
        self._began = time.monotonic()
        self._pool = _Compilers(self._device, self._threads)
        self._mode = AsyncCompileMode(self._pool, ignore_errors=True)
        self._mode.__enter__()
        self._token = _rehearsing.set(True)
        return self

    def __exit__(self, *raised: Any) -> None:
        _rehearsing.reset(self._token)
        asked = time.monotonic()
        try:
            self._mode.__exit__(*raised)
        finally:
            self._pool.shutdown()
        logger.info(
            "%d kernels ready in %.2f s, %.2f s of it spent waiting for compilers",
            len(self._pool.futures),
            time.monotonic() - self._began,
            time.monotonic() - asked,
        )

    def compiles(self) -> bool:
        """Whether there is something to compile: else all that was asked for so far came from
        Triton's cache."""
        return bool(wait(self._pool.futures, timeout=CACHED_SECONDS).not_done)


class _Compilers(ThreadPoolExecutor):
    """Threads that compile a kernel, and load it on the device; remembers what it was asked for."""

    def __init__(self, device: torch.device, threads: int) -> None:
        super().__init__(threads, "jackfield-compile")
        self._device = device
        self.futures: list[_Compilation] = []

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        future = _Compilation(compile_kernel)
        self.futures.append(future)
        super().submit(future.run, self._device)
        return future


class _Compilation(Future[Any]):
    """A kernel. Who asks for one that failed gets it compiled again, in place: a compiler that had
    no room beside others has it alone, and other failures are raised where they belong."""

    def __init__(self, compile_kernel: Callable[[], Any]) -> None:
        super().__init__()
        self._compile = compile_kernel

    def run(self, device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # Triton loads to the thread's current one.
            kernel = self._compile()
            # A property that loads it; some versions of Triton run the C compiler for that.
            _ = kernel.run
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(kernel)

    def result(self, timeout: float | None = None) -> Any:
        if self.exception(timeout) is not None:
            return self._compile()
        return super().result(timeout)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


__all__ = [
    "Rehearsal",
    "can_rehearse",
    "launch",
    "load_compiler",
    "load_one_at_a_time",
    "num_loaded",
]
