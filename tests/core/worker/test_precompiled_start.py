"""A start goes through its steps while kernels are only compiled: what they leave is never read."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from replaying import RecordingExecutor
from test_graphs import StaticTorchAttention, WritingRecorder  # type: ignore[import-not-found]

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.hooks import hookimpl
from jackfield.core.nn.operations import Operations
from jackfield.core.nn.step_operations.inputs import DecodeTensors
from jackfield.core.registry import Plugins, Provenance, load_plugins
from jackfield.core.worker.start import device_init

from helpers import at_once, make_checkpoint


class Precompiling(Operations):
    """Leaves numbers that no step survives, as kernels do that are not launched."""

    instances: list[Precompiling] = []
    fails = False

    def __init__(self) -> None:
        self.instances.append(self)
        self.precompiling = False
        self.rows: list[int] = []

    @contextlib.contextmanager
    def _precompile(self) -> Iterator[Precompiling]:
        self.precompiling = True
        try:
            yield self
        finally:
            self.precompiling = False

    def precompile(self, device: torch.device) -> contextlib.AbstractContextManager[Precompiling]:
        return self._precompile()

    def lacks(self, configuration: str) -> bool:
        if self.fails:
            raise RuntimeError("no room for a compiler")
        return True

    def linear(self, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        out = super().linear(x, *args, **options)
        return out.fill_(float("nan")) if self.precompiling else out

    def decode_inputs(self, *args: Any) -> DecodeTensors:
        inputs = super().decode_inputs(*args)
        if self.precompiling:
            self.rows.append(len(inputs.slots))
            for tensor in inputs:
                tensor.fill_(-(1 << 30))
        return inputs


class Executor(RecordingExecutor):
    ready: list[str] = []
    recorder_class = WritingRecorder

    @staticmethod
    def initialize_device(config: EngineConfig, plugins: Plugins) -> None:
        Executor.ready.append(config.device)
        raise RuntimeError("not now")


class Plugin:
    jackfield_api = 3

    @hookimpl
    def register_executors(self, registry: Any) -> None:
        registry.add("precompiling", Executor)

    @hookimpl
    def register_attention_backends(self, registry: Any) -> None:
        registry.add("static", StaticTorchAttention)

    @hookimpl
    def register_operations(self, registry: Any) -> None:
        registry.add("precompiling", Precompiling)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


async def answers(checkpoint: Path, operations: str, **options: Any) -> list[list[int]]:
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "precompiling"))
    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", skip_tokenizer_init=True,
        max_model_len=96, max_num_seqs=6, max_num_batched_tokens=48, operations=operations,
        attention_backend="static", executor="precompiling", **options,
    )  # fmt: skip

    async def run_one(engine: AsyncEngine, number: int) -> list[int]:
        params = SamplingParams(
            max_tokens=12, seed=number, temperature=0.5 * (number % 3), ignore_eos=True,
            detokenize=False, repetition_penalty=1.2 if number == 4 else 1.0,
        )  # fmt: skip
        async for out in engine.generate([3 + number] * (1 + 5 * number), params):
            last = out
        return list(last.outputs[0].token_ids)

    async with AsyncEngine(config, plugins=plugins) as engine:
        return await at_once(engine, *(run_one(engine, number) for number in range(6)))


async def test_precompilation_leaves_no_state(checkpoint: Path) -> None:
    precompiled = await answers(checkpoint, "precompiling")
    assert Precompiling.instances[-1].rows == [1, 1, 2, 4, 6]
    assert precompiled == await answers(checkpoint, "torch")


async def test_failed_precompilation_does_not_prevent_the_start(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Precompiling, "fails", True)
    with caplog.at_level(logging.INFO, "jackfield.worker"):
        precompiled = await answers(checkpoint, "precompiling")
    assert "no room for a compiler" in caplog.text
    assert precompiled == await answers(checkpoint, "torch")


async def test_an_executor_may_get_ready_and_may_fail_to(checkpoint: Path) -> None:
    Executor.ready.clear()
    await answers(checkpoint, "torch")
    assert Executor.ready == ["cpu"]


@pytest.mark.parametrize("number", [None, 1])
def test_operations_get_ready_beside_the_device(
    number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is initialised, on the first one; afterwards on that of the thread, as a rank's.
    Neither waits for the other."""
    begun, ready = threading.Event(), threading.Event()
    devices: list[torch.device] = []

    class Waiting(Operations):
        @classmethod
        def initialize_device(cls, device: torch.device) -> None:
            ready.set()
            if begun.wait(60):
                devices.append(device)

    class WaitingPlugin:
        jackfield_api = 3

        @hookimpl
        def register_operations(self, registry: Any) -> None:
            registry.add("waiting", Waiting)

    def initialize(*size: int, device: torch.device) -> None:
        if ready.wait(60):
            devices.append(device)
        begun.set()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: number is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: number)
    monkeypatch.setattr(torch, "empty", initialize)
    plugins = load_plugins()
    plugins.add_plugin(WaitingPlugin(), Provenance("tests", "0", "waiting"))
    config = EngineConfig(model="any", device="cuda", operations="waiting")
    device_init.initialize_device(config, plugins)
    assert devices == [torch.device("cuda", number or 0)] * 2
