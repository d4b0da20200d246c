"""Recorded steps where there are no CUDA graphs: a replay calls what was recorded again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from jackfield.plugins.executors.inprocess import InProcessExecutor


class Recorder:
    """Counts replays."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        function()

        def replay() -> None:
            self.replays += 1
            function()

        return replay


class RecordingExecutor(InProcessExecutor):
    recorders: ClassVar[list[Recorder]] = []
    """Of all such executors, the newest last."""
    recorder_class: ClassVar[type[Recorder]] = Recorder

    def __init__(self, config: Any, model_config: Any, plugins: Any) -> None:
        super().__init__(config, model_config, plugins)
        recorder = self.recorder_class()
        self.recorders.append(recorder)
        self._worker._recorder = lambda: recorder  # type: ignore[method-assign]


class MixedRecordingExecutor(RecordingExecutor):
    """Records all mixed steps at its start, where others do it while they are idle."""

    async def start(self) -> Any:
        info = await super().start()
        graphs: Any = self._worker.runner.mixed.graphs  # type: ignore[union-attr]

        @torch.inference_mode()
        def record() -> None:
            while graphs.record_next():
                pass

        assert self._thread is not None
        await self._thread.call(record)
        return info
