"""Precompilation compiles what steps launch, on several threads; nothing is compiled after it.

Triton compiles for a Hopper GPU wherever it runs. What stands in for its driver takes launches and
does nothing, so these tests see which kernels are compiled when, and never what they compute.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sources import last_name

import jackfield
from jackfield.kernels import compile as compile_kernels
from jackfield.kernels.launch import compile_only
from jackfield.kernels.moe import topk_experts

if importlib.util.find_spec("triton.runtime._async_compile") is None:
    pytest.skip("Triton cannot compile aside", allow_module_level=True)

PROGRAMS = Path(__file__).parent / "programs"
MODELS = ["qwen3", "qwen3_5", "mamba", "glm_moe_dsa"]
"""Of programs/serve_requests.py: two that keep states of sequences, and one with an indexer, whose
steps of short rows launch other kernels."""


def jitted(tree: ast.AST) -> set[str]:
    """Names of the Triton kernels that a module defines; what they call is not launched."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def test_every_kernel_of_ours_is_launched_so_that_precompilation_sees_it() -> None:
    """One that ran for itself would read places that another did not write."""
    root = Path(jackfield.__file__).parent
    texts = [
        path.read_text()
        for folder in ("kernels", "plugins")
        for path in (root / folder).rglob("*.py")
    ]
    trees = [ast.parse(text) for text in texts if "_kernel" in text]
    kernels = set().union(*map(jitted, trees))
    assert "_gemv_kernel" in kernels
    launches = {
        ast.unparse(node)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and last_name(node.value) in kernels
    }
    assert not launches, f"launch(kernel, grid) from jackfield.kernels.compile: {launches}"


def run(program: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, str(PROGRAMS / program), str(folder), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_kernels_compile_aside_and_failures_come_at_the_launch(tmp_path: Path) -> None:
    completed = run("precompile_kernels.py", tmp_path)
    assert completed.returncode == 0, completed.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [*((model,) for model in MODELS), ("glm_moe_dsa", "eager")], ids=" ".join
)
def test_after_a_precompiled_start_no_step_compiles_anything(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    completed = run("serve_launching.py", tmp_path, *arguments)
    assert completed.returncode == 0, completed.stderr[-3000:]


@pytest.mark.slow
def test_a_start_that_finds_some_kernels_in_the_cache_compiles_the_others(tmp_path: Path) -> None:
    """Those of the first steps are there, from a start with fewer requests at once."""
    for arguments in (("2",), ("12",), ("12",)):
        completed = run("serve_launching.py", tmp_path, "qwen3", *arguments)
        assert completed.returncode == 0, completed.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_after_a_start_on_a_device_no_step_compiles_anything(model: str, tmp_path: Path) -> None:
    completed = run("serve_on_device.py", tmp_path, model)
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

    shared = types.ModuleType("launcher")

    def load(name: str) -> types.ModuleType:
        """Load as CPython does where a file was loaded before: into the last module of its name."""
        nonlocal inside, most
        with counting:
            inside += 1
            most = max(most, inside)
        shared.launch = name  # type: ignore[attr-defined]
        threading.Event().wait(0.01)
        with counting:
            inside -= 1
        return shared

    build = types.SimpleNamespace(_load_module_from_path=load)
    load_one_at_a_time(build)
    load_one_at_a_time(build)
    loaded: list[tuple[str, str]] = []
    done = threading.Barrier(4)

    def run(name: str) -> None:
        entered.wait()
        module = build._load_module_from_path(name)
        done.wait()
        loaded.append((name, module.launch))

    threads = [threading.Thread(target=run, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(loaded) == [(name, name) for name in "0123"] and most == 1


def test_chosen_experts_can_be_followed_where_no_kernel_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma 4 reads a factor of each chosen expert: an index that nothing wrote would end the
    process on a GPU."""
    monkeypatch.setattr(topk_experts, "launch", lambda *_: lambda *_, **__: None)
    token = compile_only.set(True)
    torch.use_deterministic_algorithms(True)  # Uninitialised tensors hold the largest numbers.
    try:
        _, experts = topk_experts.topk_experts(torch.zeros(5, 8), 3, renormalize=True)
        assert int(torch.empty_like(experts).max()) > 8
    finally:
        torch.use_deterministic_algorithms(False)
        compile_only.reset(token)
    assert 0 <= int(experts.min()) and int(experts.max()) < 8


def test_triton_hashes_its_files_before_it_waits_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[object] = []

    @contextlib.contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        order.append(device)
        yield

    def warmup(*types: object, grid: tuple[int]) -> SimpleNamespace:
        order.append("first kernel")
        return SimpleNamespace(run=None)

    monkeypatch.setattr(compile_kernels, "triton_key", lambda: order.append("hash"))
    monkeypatch.setattr(compile_kernels, "_smallest_kernel", SimpleNamespace(warmup=warmup))
    monkeypatch.setattr(torch.cuda, "device", entered)
    device = torch.device("cuda", 1)
    compile_kernels.load_compiler(device)
    assert order == ["hash", device, "first kernel"]
