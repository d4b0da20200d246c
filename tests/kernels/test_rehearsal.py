"""A rehearsal compiles what steps launch, side by side, and nothing is compiled after it.

Triton compiles for a Hopper GPU wherever it runs. What stands in for its driver takes launches and
does nothing, so these tests see which kernels are compiled when, and never what they compute.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jackfield

if importlib.util.find_spec("triton.runtime._async_compile") is None:
    pytest.skip("Triton cannot compile aside", allow_module_level=True)

DRIVER = r"""
import threading
from typing import NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

compiled, launched = [], []


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
"""

KERNELS = r"""
import torch
from jackfield.kernels.compile import Precompiler, load_compiler
from jackfield.kernels.launch import launch
from jackfield.kernels.activations import silu_mul


@triton.jit
def wrong(out_ptr, SIZE: tl.constexpr):
    tl.static_assert(SIZE < 4, "too large for this kernel")
    tl.store(out_ptr, SIZE)


@triton.jit
def slow(out_ptr):
    at = tl.arange(0, 64)
    x = tl.load(out_ptr + at[:, None] * 64 + at[None, :])
    for _ in tl.static_range(40):
        x = tl.dot(x, x)
    tl.store(out_ptr + at[:, None] * 64 + at[None, :], x)


@triton.jit
def other(out_ptr):
    tl.store(out_ptr, 1)


failures = []


@triton.jit
def crowded(out_ptr):
    tl.store(out_ptr, 2)


def compile_alone(*arguments, **options):
    if threading.current_thread() is not threading.main_thread():
        failures.append(threading.current_thread().name)
        raise MemoryError("too many compilers")
    return triton.compile(*arguments, **options)


crowded.device_caches[0]
crowded.compile = compile_alone

load_compiler()
assert [name for name, _ in compiled] == ["_smallest_kernel"]
compiled.clear()
x = torch.ones(2, 64)
number = torch.zeros(1, dtype=torch.int32)
with Precompiler(torch.device("cpu"), threads=2) as kernels:
    launch(slow, (1,))(torch.zeros(64, 64))
    silu_mul(x)
    assert kernels.compiles()
    silu_mul(x.to(torch.bfloat16))
    silu_mul(x)
    launch(wrong, (1,))(number, SIZE=8)
    launch(crowded, (1,))(number)
    assert launched == []
    other[(1,)](number)
    assert launched == ["other"]
threads = {thread.partition("_")[0] for _, thread in compiled}
assert threads == {"jackfield-compile", "MainThread"}, threads
assert len(failures) == 1 and ("crowded", "MainThread") in compiled
assert not any("compile" in thread.name for thread in threading.enumerate())
assert sorted(name for name, _ in compiled) == [
    "_gated_activation_kernel", "_gated_activation_kernel", "crowded", "other", "slow"
]

silu_mul(x)
silu_mul(x.to(torch.bfloat16))
assert launched == ["other", *["_gated_activation_kernel"] * 2] and len(compiled) == 5
with Precompiler(torch.device("cpu"), threads=2) as kernels:
    silu_mul(x)
    assert not kernels.compiles()
for _ in range(2):
    try:
        launch(wrong, (1,))(number, SIZE=8)
    except triton.compiler.CompilationError as error:
        assert "too large for this kernel" in str(error)
    else:
        raise AssertionError("a kernel that does not compile was launched")
"""

ENGINE = r"""
import asyncio
import json
import sys
from pathlib import Path

import torch
from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.hooks import hookimpl
from jackfield.core.registry import Provenance, load_plugins
from jackfield.kernels.compile import Precompiler
from jackfield.plugins.attention.triton import TritonAttention
from jackfield.plugins.executors.inprocess import InProcessExecutor
from jackfield.plugins.operations import triton as operations

# Kernels do not run: what they would have written may at least be read.
torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
operations.small_m_config = lambda product, rows, device: (
    operations.SmallMConfig(16 if rows <= 16 else 32, 64, 64, 2, 4, 2) if rows < 4 else None
)


class Attention(TritonAttention):
    supports = classmethod(lambda *_: None)


class Kernels(operations.TritonOperations):
    supports = classmethod(lambda *_: None)

    def precompile(self, device):
        return Precompiler(torch.device("cpu"))


class Executor(InProcessExecutor):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._worker._recorder = lambda: lambda function: function


class Plugin:
    jackfield_api = 2

    @hookimpl
    def register_executors(self, registry):
        registry.add("launching", Executor)

    @hookimpl
    def register_attention_backends(self, registry):
        registry.add("launching", Attention)

    @hookimpl
    def register_operations(self, registry):
        registry.add("launching", Kernels)


options = {
    "device": "cpu", "cpu_kvcache_space": 0.05, "executor": "launching",
    "operations": "launching", "attention_backend": "launching",
}
plugins = load_plugins()
plugins.add_plugin(Plugin(), Provenance("tests", "0", "launching"))
"""

DEVICE = r"""
import asyncio
import json
import sys
import threading
from pathlib import Path

import triton
from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.registry import load_plugins

compiled = []


def on_compiled(*, src, cache_hit, **_):
    if not cache_hit and src.name != "_smallest_kernel":
        compiled.append((src.name, threading.current_thread().name))


triton.knobs.compilation.listener = on_compiled
options, plugins, launched = {"device": "cuda", "num_gpu_blocks_override": 200}, None, None
"""

REQUESTS = r"""
folder = Path(sys.argv[1])
folder.joinpath("config.json").write_text(json.dumps({
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 192, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}))
config = EngineConfig(
    model=str(folder), load_format="dummy", dtype="bfloat16", max_model_len=1000,
    skip_tokenizer_init=True, max_num_seqs=12, max_num_batched_tokens=600, **options,
)


async def main():
    async with AsyncEngine(config, plugins=plugins) as engine:
        names = {name for name, _ in compiled}
        assert {"_prefill_kernel", "_fused_decode_kernel"} <= names
        ready = len(compiled)

        async def ask(length, each=lambda: None, **options):
            params = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False, **options)
            async for _ in engine.generate([n % 150 for n in range(length)], params):
                each()

        while await engine.core.executor._thread.call(engine.core.executor._worker.prepare_ahead):
            pass
        for length in (1, 3, 12, 100, 700):
            await ask(length, temperature=0.0)
        others = []

        def one_more():
            if len(others) < 11:
                others.append(asyncio.create_task(ask(17 * len(others) + 1, temperature=0.7)))

        # Prompts that come while others decode.
        await ask(9, one_more)
        await asyncio.gather(*others)
    for name, thread in compiled[:ready]:
        assert thread.startswith("jackfield-compile"), f"{name} was compiled on {thread}"
    assert not compiled[ready:], compiled[ready:]
    if launched is not None:
        assert names - {"_smallest_kernel"} <= set(launched), names - set(launched)
        wanted = {"_decode_kernel", "_small_m_matmul_kernel", "_row_kernel"}
        assert wanted <= names, wanted - names


asyncio.run(main())
"""


def jitted(tree: ast.AST) -> set[str]:
    """Names of the Triton kernels that a module defines; what they call is not launched."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def test_every_kernel_of_ours_is_launched_so_that_a_rehearsal_sees_it() -> None:
    """One that ran for itself would read places that another did not write."""
    root = Path(jackfield.__file__).parent
    trees = [
        ast.parse(path.read_text())
        for folder in ("kernels", "plugins")
        for path in (root / folder).rglob("*.py")
    ]
    kernels = set().union(*map(jitted, trees))
    assert "_gemv_kernel" in kernels
    launches = {
        ast.unparse(node)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] in kernels
    }
    assert not launches, f"launch(kernel, grid) from jackfield.kernels.compile: {launches}"


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    path = folder / "program.py"
    path.write_text(program)
    return subprocess.run(
        [sys.executable, str(path), str(folder)], env=environment, capture_output=True, text=True
    )


def test_kernels_compile_aside_and_failures_come_at_the_launch(tmp_path: Path) -> None:
    completed = run(DRIVER + KERNELS, tmp_path)
    assert completed.returncode == 0, completed.stderr[-3000:]


def test_after_a_rehearsed_start_no_step_compiles_anything(tmp_path: Path) -> None:
    completed = run(DRIVER + ENGINE + REQUESTS, tmp_path)
    assert completed.returncode == 0, completed.stderr[-3000:]


@pytest.mark.gpu
def test_after_a_start_on_a_device_no_step_compiles_anything(tmp_path: Path) -> None:
    completed = run(DEVICE + REQUESTS, tmp_path)
    assert completed.returncode == 0, completed.stderr[-3000:]


def test_launchers_are_loaded_one_at_a_time() -> None:
    """Triton's launchers share one module name: two loads at a time swap their functions."""
    import threading
    import types

    from triton.runtime import build as triton_build

    from jackfield.kernels.compile import load_one_at_a_time

    assert getattr(triton_build._load_module_from_path, "one_at_a_time", False)
    inside, most, entered = 0, 0, threading.Barrier(4)
    counting = threading.Lock()

    def load(name: str) -> str:
        nonlocal inside, most
        with counting:
            inside += 1
            most = max(most, inside)
        threading.Event().wait(0.01)
        with counting:
            inside -= 1
        return name

    build = types.SimpleNamespace(_load_module_from_path=load)
    load_one_at_a_time(build)
    load_one_at_a_time(build)
    loaded: list[str] = []

    def run(name: str) -> None:
        entered.wait()
        loaded.append(build._load_module_from_path(name))

    threads = [threading.Thread(target=run, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(loaded) == ["0", "1", "2", "3"] and most == 1
