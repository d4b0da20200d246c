"""Replaces Triton's driver: kernels compile for a Hopper GPU, launches are only recorded."""

import threading

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

compiled, launched = [], []
"""(kernel, thread) of each compilation; the kernel of each launch."""


def on_compiled(*, src, cache_hit, **_):
    assert not cache_hit, src.name
    compiled.append((src.name, threading.current_thread().name))


class Utils:
    def get_device_properties(self, device):
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name, kernel, shared, device):
        assert kernel
        return object(), name, 32, 0, 1024


class Driver:
    utils = Utils()

    def launcher_cls(self, source, metadata):
        return lambda *arguments: launched.append(source.name)

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


driver.set_active(Driver())
triton.knobs.compilation.listener = on_compiled
