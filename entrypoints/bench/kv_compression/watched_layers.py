"""The worker half: outputs of attention layers, kept and compared where they are computed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ....core.nn.context import ForwardContext
from ....core.step import NOTHING_IN_PROCESS, InProcess, PartPlan, SlotStart
from ....core.worker.launched_step import LaunchedStep
from ....core.worker.parts.part import PartSite, PartStart, Report, StartContext, WorkerPart
from .similarities import NAME, REFERENCE, Similarities


class WatchStart(PartStart):
    option = f"parts.{NAME}"

    def __init__(self, start: StartContext, first: int, count: int) -> None:
        self._start, self._first, self._count = start, first, count

    def make(self, site: PartSite) -> WatchedLayers:
        return WatchedLayers(self._start, self._first, self._count)


class WatchedLayers(WorkerPart):
    name = NAME

    def __init__(self, start: StartContext, first: int, count: int) -> None:
        self._first, self._count = first, count
        self._role: str | None = None
        """Role of the running request."""
        self._outputs: dict[int, torch.Tensor] = {}
        """Layer → the reference's outputs, [count, size] float32"""
        self._sums = torch.zeros(len(start.layers), device=start.device)
        self._num_tokens = 0
        for number, layer in enumerate(start.layers):
            layer.register_forward_hook(self._hook(number))

    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        self._role = (start.params.extra_args or {}).get(NAME)

    def release(self, slot: int) -> None:
        self._role = None

    def _hook(self, number: int) -> Any:
        def keep(layer: Any, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
            if self._role is None:
                return
            context = next(each for each in arguments if isinstance(each, ForwardContext))
            places = context.positions[: len(output)] - self._first
            own = (places >= 0) & (places < self._count)
            self._add(number, places[own], output[own].float())

        return keep

    def _add(self, number: int, places: torch.Tensor, outputs: torch.Tensor) -> None:
        if self._role == REFERENCE:
            if number not in self._outputs:
                self._outputs[number] = outputs.new_zeros(self._count, outputs.shape[1])
            self._outputs[number][places] = outputs
            return
        cosines = F.cosine_similarity(self._outputs[number][places], outputs, dim=1)
        self._sums[number] += cosines.sum()
        if number == 0:
            self._num_tokens += len(places)

    def after(self, part: PartPlan | None, step: LaunchedStep) -> Report | None:
        if not self._num_tokens:
            return None
        sums, count = self._sums.clone(), self._num_tokens
        self._sums.zero_()
        self._num_tokens = 0
        return lambda: Similarities(tuple(sums.tolist()), count)
