"""Compilation of a step's kernels in parallel, before the first launch.

Triton compiles a kernel when it is first launched, one after the other. In a `Precompiler` a launch
only submits the compilation to one of several threads. No kernel runs, so output tensors have
undefined contents.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
import triton
import triton.language as tl

from .launch import compile_only

try:
    from triton.runtime._async_compile import AsyncCompileMode
except ImportError:  # A Triton without it: kernels compile when they are launched.
    AsyncCompileMode = None

try:
    from triton.compiler import ASTSource
except ImportError:  # Another version of Triton, which may initialise differently.
    ASTSource = None

try:
    from triton.runtime import build as triton_build
except ImportError:  # Another version of Triton, which may load differently.
    triton_build = None

try:
    from triton.runtime.cache import triton_key
except ImportError:  # Another version of Triton, which hashes its files for the first kernel.
    triton_key = None

logger = logging.getLogger("jackfield.kernels")

MAX_THREADS = 16
CACHED_SECONDS = 0.1
"""Between loading a compiled kernel (milliseconds) and compiling one (0.2 s or more)."""


@triton.jit
def _smallest_kernel(out_ptr):
    tl.store(out_ptr, 0)


def load_compiler(device: torch.device) -> None:
    """Initialise Triton for a device, so that the first kernel need not wait for it.

    Triton hashes its own files (some 460 MB), which needs no device: another thread may initialise
    the device meanwhile.
    """
    if triton_key is not None:
        triton_key()
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        _ = _smallest_kernel.warmup(torch.int32, grid=(1,)).run


def can_precompile() -> bool:
    return AsyncCompileMode is not None and os.environ.get("TRITON_INTERPRET") != "1"


_loading = threading.RLock()


def load_one_at_a_time(build: Any) -> None:
    """Serialize Triton's loading of launchers across threads, and give each its own module.

    `build`: the module `triton.runtime.build`. All launchers are extension modules of one name,
    under which CPython keeps a loaded one's functions in `sys.modules`: of two threads, or two
    engines, one can get the other's launcher ("function takes exactly 21 arguments (29 given)",
    Triton 3.6, CPython 3.12).
    """
    load = getattr(build, "_load_module_from_path", None)
    if load is None or getattr(load, "one_at_a_time", False):
        return

    @functools.wraps(load)
    def locked(*args: Any, **options: Any) -> Any:
        with _loading:
            shared = load(*args, **options)
            own = types.ModuleType(shared.__name__)
            own.__dict__.update(vars(shared))
            return own

    locked.one_at_a_time = True  # type: ignore[attr-defined]
    build._load_module_from_path = locked


def translate_one_at_a_time(source: Any) -> None:
    """Serialize Triton's translation of kernels' Python across threads.

    `source`: the class `triton.compiler.ASTSource`. It keeps the interpreter lock, and threads that
    contend for the lock take a fourth longer in total.
    """
    make_ir = getattr(source, "make_ir", None)
    if make_ir is None or getattr(make_ir, "one_at_a_time", False):
        return

    @functools.wraps(make_ir)
    def locked(*args: Any, **options: Any) -> Any:
        with _translating:
            return make_ir(*args, **options)

    locked.one_at_a_time = True  # type: ignore[attr-defined]
    source.make_ir = locked


_translating = threading.RLock()


class _Loads:
    """Counts kernels that Triton has loaded onto a device, newly compiled or from its cache."""

    def __init__(self) -> None:
        self.count = 0
        with contextlib.suppress(AttributeError):
            triton.knobs.runtime.kernel_load_end_hook.add(self._loaded)

    def _loaded(self, *args: Any, **options: Any) -> None:
        self.count += 1


_loads = _Loads()


def num_loaded() -> int:
    """Return the number of kernels loaded in this process; 0 if unknown."""
    return _loads.count


if triton_build is not None:
    load_one_at_a_time(triton_build)
if ASTSource is not None:
    translate_one_at_a_time(ASTSource)


class Precompiler:
    """A context for one thread; leaving it waits for all compilations.

    A failed compilation is repeated when its kernel is launched, and raises there if it fails
    again. Kernels that are launched without `launch` compile and run as usual.
    """

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        self._device = device
        self._threads = threads or min(MAX_THREADS, _cores())

    def __enter__(self) -> Precompiler:
        self._began = time.monotonic()
        self._pool = _Compilers(self._device, self._threads)
        self._mode = AsyncCompileMode(self._pool, ignore_errors=True)
        self._mode.__enter__()
        self._token = compile_only.set(True)
        return self

    def __exit__(self, *raised: Any) -> None:
        compile_only.reset(self._token)
        start = time.monotonic()
        try:
            self._mode.__exit__(*raised)
        finally:
            self._pool.shutdown()
        logger.info(
            "%d kernels ready in %.2f s, %.2f s of it spent waiting for compilers",
            len(self._pool.futures),
            time.monotonic() - self._began,
            time.monotonic() - start,
        )

    def compiles(self) -> bool:
        """Whether any kernel had to be compiled; otherwise all kernels so far came from Triton's
        cache."""
        return bool(wait(self._pool.futures, timeout=CACHED_SECONDS).not_done)


class _Compilers(ThreadPoolExecutor):
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
    """The compilation of a kernel. `result` compiles a failed one again on the calling thread,
    where it cannot run out of memory because of others.
    """

    def __init__(self, compile_kernel: Callable[[], Any]) -> None:
        super().__init__()
        self._compile = compile_kernel

    def run(self, device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # Triton loads to the thread's current device.
            kernel = self._compile()
            # A property that loads the kernel; some versions of Triton run the C compiler for it.
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
    "Precompiler",
    "can_precompile",
    "load_compiler",
    "load_one_at_a_time",
    "num_loaded",
    "translate_one_at_a_time",
]
