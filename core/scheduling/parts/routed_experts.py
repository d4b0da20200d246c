"""Routed experts: kept by place in the cache, and handed out when requests end."""

from __future__ import annotations

import numpy as np

from ...parts.routed_experts import NAME, RoutedShape, RoutedTokens
from ...request import Request
from ...step import StepPlan, StepResult
from .part import PartMaker, PartServices, SchedulerPart


class RoutedExperts(SchedulerPart):
    """Keeps the choices of each cached token in host memory.

    By place, so that a prefix hit brings the choices of its tokens. A place is written again when
    its token is computed again: after a preemption, or behind rejected drafts.
    """

    name = NAME

    def __init__(self, services: PartServices, shape: RoutedShape, num_blocks: int) -> None:
        self._group, self._block_size = shape.group, services.kv.block_size
        size = (num_blocks * self._block_size, shape.num_layers, shape.top_k)
        self._kept = np.zeros(size, dtype=shape.dtype)

    @classmethod
    def maker(cls, shape: RoutedShape, num_blocks: int) -> PartMaker:
        """Return what makes the part; `num_blocks`: those of the cache."""
        return lambda services: cls(services, shape, num_blocks)

    def begin_result(self, plan: StepPlan, result: StepResult) -> None:
        routed = result.parts.get(NAME)
        if isinstance(routed, RoutedTokens):
            places = np.frombuffer(routed.places, dtype=np.int64)
            experts = np.frombuffer(routed.experts, dtype=self._kept.dtype)
            self._kept[places] = experts.reshape(len(places), *self._kept.shape[1:])

    def ended(self, request: Request) -> None:
        """Hand out the choices of all tokens but the last, which was never computed."""
        if request.finish_reason == "error" or not request.tables:
            return
        count = request.num_known_tokens - 1
        columns = -(-count // self._block_size)
        blocks = np.asarray(request.tables[self._group][:columns], dtype=np.int64)
        places = blocks[:, None] * self._block_size + np.arange(self._block_size)
        request.routed_experts = self._kept[places.reshape(-1)[:count]]
