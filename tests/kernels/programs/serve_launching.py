"""Serves requests with an executor whose launches are only recorded; with `eager`, no step is."""

import sys

import torch
from launch_driver import compiled, launched
from serve_requests import serve

from jackfield.core.hooks import hookimpl
from jackfield.core.registry import Provenance, load_plugins
from jackfield.core.worker.start import step_graphs
from jackfield.kernels.compile import Precompiler
from jackfield.kernels.indexer import index_choice
from jackfield.plugins.attention.triton import TritonAttention
from jackfield.plugins.attention.triton_latent import TritonLatentAttention
from jackfield.plugins.executors.inprocess import InProcessExecutor
from jackfield.plugins.operations import layers
from jackfield.plugins.operations.triton import TritonOperations

EAGER = "eager" in sys.argv
# The first requests come before most is recorded.
step_graphs.RECORDING_SECONDS = 0.0
index_choice.LONG_ROW = 512
# Kernels do not run: what they would have written may at least be read.
torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
layers.small_m_config = lambda product, rows, device: (
    layers.SmallMConfig(16 if rows <= 16 else 32, 64, 64, 2, 4, 2) if rows < 4 else None
)


class Attention(TritonAttention):
    supports = classmethod(lambda *_: None)


class LatentAttention(TritonLatentAttention):
    supports = classmethod(lambda *_: None)


class Kernels(TritonOperations):
    supports = classmethod(lambda *_: None)

    def precompile(self, device):
        return Precompiler(torch.device("cpu"))

    def write_tokens(self, chosen, runs, ring, last):
        """Write which run this is, too, as the worker looks at it."""
        super().write_tokens(chosen, runs, ring, last)
        runs += 1
        ring[int(runs) % len(ring), 0] = runs[0]


class Executor(InProcessExecutor):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        if not EAGER:
            self._worker._recorder = lambda: lambda function: function


class Plugin:
    jackfield_api = 3

    @hookimpl
    def register_executors(self, registry):
        registry.add("launching", Executor)

    @hookimpl
    def register_attention_backends(self, registry):
        registry.add("launching", Attention)

    @hookimpl
    def register_latent_attention_backends(self, registry):
        registry.add("launching", LatentAttention)

    @hookimpl
    def register_operations(self, registry):
        registry.add("launching", Kernels)


OPTIONS = {
    "device": "cpu",
    "cpu_kvcache_space": 0.05,
    "executor": "launching",
    "operations": "launching",
    "attention_backend": "launching",
    "enforce_eager": EAGER,
}
plugins = load_plugins()
plugins.add_plugin(Plugin(), Provenance("tests", "0", "launching"))
serve(OPTIONS, plugins, compiled, launched)
