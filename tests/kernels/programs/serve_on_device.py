"""Serves requests on the GPU, and records what is compiled."""

import threading

import triton
from serve_requests import serve

compiled = []


def on_compiled(*, src, cache_hit, **_):
    if not cache_hit and src.name != "_smallest_kernel":
        compiled.append((src.name, threading.current_thread().name))


triton.knobs.compilation.listener = on_compiled
serve({"device": "cuda", "num_gpu_blocks_override": 200}, None, compiled, None)
