"""Memory that processes share, with a driver that knows which threads have a context."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from jackfield.plugins.collectives import shared_memory
from jackfield.plugins.collectives.builtin import _environment
from jackfield.plugins.collectives.shared_memory import SharedMemory

INVALID_CONTEXT = 201
WITHOUT_CONTEXT = ("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2",
                   "cuCtxPushCurrent_v2", "cuGetErrorName")  # fmt: skip


class Driver:
    """Fails as CUDA's does where the calling thread has no current context."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.retained = 0
        self._thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            depth = getattr(self._thread, "depth", 0)
            if name not in WITHOUT_CONTEXT and not depth:
                return INVALID_CONTEXT
            self.calls.append(name)
            pushed = {"cuCtxPushCurrent_v2": 1, "cuCtxPopCurrent_v2": -1}.get(name, 0)
            self._thread.depth = depth + pushed
            retained = {"cuDevicePrimaryCtxRetain": 1, "cuDevicePrimaryCtxRelease_v2": -1}
            self.retained += retained.get(name, 0)
            return 0

        return call


def test_memory_is_closed_on_a_thread_that_has_called_nothing_of_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where rank 0 leaves a group whose other ranks are gone."""
    driver = Driver()
    monkeypatch.setattr(shared_memory, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    memory = SharedMemory(torch.device("cuda", 1), 64)
    memory.open(memory.handle())
    errors: list[BaseException] = []

    def close() -> None:
        try:
            memory.close()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert not errors and driver.calls.count("cuIpcCloseMemHandle") == 1
    assert driver.retained == 0 and driver.calls[-1] == "cuDevicePrimaryCtxRelease_v2"


def test_variables_of_a_library_are_set_while_it_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CHOSEN_BY_THE_USER", "1")
    with _environment({"CHOSEN_BY_THE_USER": "0", "LEFT_OPEN_BY_THE_USER": "0"}):
        assert os.environ["CHOSEN_BY_THE_USER"] == "1"
        assert os.environ["LEFT_OPEN_BY_THE_USER"] == "0"
    assert os.environ["CHOSEN_BY_THE_USER"] == "1" and "LEFT_OPEN_BY_THE_USER" not in os.environ
