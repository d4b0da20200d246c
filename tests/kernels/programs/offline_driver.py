"""Replaces Triton's driver: kernels compile for a Hopper GPU, and launches do nothing."""

import re
import subprocess
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Utils:
    def get_device_properties(self, device):
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name, kernel, shared, device):
        assert kernel
        return object(), name, 32, 0, 1024


class Driver:
    utils = Utils()

    def launcher_cls(self, source, metadata):
        return lambda *arguments: None

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def usage(kernel):
    """Return the registers and the bytes of stack of a compiled kernel: REG, STACK. The first
    argument of the command line is a folder to write to."""
    path = Path(sys.argv[1]) / "kernel"
    path.write_bytes(kernel.asm["cubin"])
    objdump = triton.knobs.nvidia.cuobjdump.path
    actual = subprocess.check_output([objdump, "-res-usage", str(path)], text=True)
    return dict(re.findall(r"(REG|STACK):(\d+)", actual))


driver.set_active(Driver())
