"""Replaces Triton's driver: kernels compile for a Hopper GPU, launches are only recorded."""

import threading

import triton
from offline_driver import Driver
from triton.runtime import driver

compiled, launched = [], []
"""(kernel, thread) of each compilation, not of what comes from the cache; the kernel of each
launch."""


def on_compiled(*, src, cache_hit, **_):
    if not cache_hit:
        compiled.append((src.name, threading.current_thread().name))


class RecordingDriver(Driver):
    def launcher_cls(self, source, metadata):
        return lambda *arguments: launched.append(source.name)


driver.set_active(RecordingDriver())
triton.knobs.compilation.listener = on_compiled
