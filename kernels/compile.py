"""Compilation of a step's kernels in parallel, before the first launch.

Triton compiles a kernel when it is first launched, one after the other. In a `Precompiler` a launch
only submits the compilation to one of several threads. No kernel runs, so output tensors have
undefined contents.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
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

try:
    from triton.runtime.cache import get_cache_manager
except ImportError:  # Another version of Triton: each start looks for what it may have to compile.
    get_cache_manager = None

logger = logging.getLogger("jackfield.kernels")

MAX_THREADS = 16
CACHED_SECONDS = 0.1
"""Between loading a compiled kernel (milliseconds) and compiling one (0.2 s or more)."""
COMPLETE = "complete"
"""A file beside Triton's compiled kernels: it has all that a configuration launches."""


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
        self._misses = _CacheMisses()
        self._configuration: str | None = None
        """Noted at the end as one whose kernels Triton's cache has."""

    def __enter__(self) -> Precompiler:
        self._began = time.monotonic()
        self._pool = _Compilers(self._device, self._threads)
        self._mode = AsyncCompileMode(self._pool, ignore_errors=True)
        self._mode.__enter__()
        self._misses.listen()
        self._token = compile_only.set(True)
        return self

    def __exit__(self, *raised: Any) -> None:
        compile_only.reset(self._token)
        start = time.monotonic()
        try:
            self._mode.__exit__(*raised)
        finally:
            self._pool.shutdown()
            self._misses.end()
        failed = any(future.exception() is not None for future in self._pool.futures)
        if self._configuration is not None and raised[0] is None and not failed:
            with contextlib.suppress(OSError):
                self._note(self._configuration).put("", COMPLETE)
        logger.info(
            "%d kernels ready in %.2f s, %.2f s of it spent waiting for compilers; %d were not in "
            "Triton's cache",
            len(self._pool.futures),
            time.monotonic() - self._began,
            time.monotonic() - start,
            self._misses.count,
        )

    def lacks(self, configuration: str) -> bool:
        """Whether Triton's cache may lack kernels besides those so far: one of these was compiled,
        or none of this configuration's precompilations ended well. If so, this one is to compile
        all.
        """
        if get_cache_manager is None:
            return True
        futures = self._pool.futures
        pending = wait(futures, timeout=CACHED_SECONDS).not_done
        compiled = pending or self._misses.count or any(future.exception() for future in futures)
        if not compiled:
            with contextlib.suppress(OSError):  # A cache that is not to be written to.
                if self._note(configuration).get_file(COMPLETE) is not None:
                    return False
        self._configuration = configuration
        return True

    def _note(self, configuration: str) -> Any:
        """Return where Triton's cache has the note on a configuration."""
        device = "cpu"
        if self._device.type == "cuda":
            device = torch.cuda.get_device_name(self._device)
        facts = configuration, device, torch.__version__, triton.__version__, sources()
        return get_cache_manager(hashlib.sha256("\n".join(facts).encode()).hexdigest())


@functools.cache
def sources() -> str:
    """Return a digest of the kernels' sources and of the tiles they are compiled with."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


class _CacheMisses:
    """Counts kernels that Triton compiles, not those that it loads from its cache."""

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = None

    def listen(self) -> None:
        with contextlib.suppress(AttributeError):
            self._before = triton.knobs.compilation.listener
            triton.knobs.compilation.listener = self._compiled

    def end(self) -> None:
        with contextlib.suppress(AttributeError):
            if triton.knobs.compilation.listener == self._compiled:
                triton.knobs.compilation.listener = self._before

    def _compiled(self, *, cache_hit: bool = False, **facts: Any) -> None:
        self.count += not cache_hit
        if self._before is not None:
            self._before(cache_hit=cache_hit, **facts)


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
