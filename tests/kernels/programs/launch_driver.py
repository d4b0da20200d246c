"""Replaces Triton's driver: kernels compile for a Hopper GPU, launches are only recorded."""

import threading

import triton
from offline_driver import Driver
from triton.runtime import driver

compiled, launched = [], []
"""(kernel, thread) of each compilation; the kernel of each launch."""


def on_compiled(*, src, cache_hit, **_):
    assert not cache_hit, src.name
    compiled.append((src.name, threading.current_thread().name))


class RecordingDriver(Driver):
    def launcher_cls(self, source, metadata):
        return lambda *arguments: launched.append(source.name)


driver.set_active(RecordingDriver())
triton.knobs.compilation.listener = on_compiled
