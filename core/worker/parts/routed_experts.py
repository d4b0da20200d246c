"""Routed experts: what the routers of a step choose, copied to the host beside its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import ConfigError
from ...nn.experts import Experts, SparseMLP
from ...parts.routed_experts import NAME, RoutedShape, RoutedTokens
from ...protocols.models import HiddenStates
from ...step import PartPlan
from ..batch import StepInputs
from ..launched_step import LaunchedStep
from ..packing import to_host
from ..selection import CacheLayer
from .part import PartSite, PartStart, Report, StartContext, WorkerPart

OPTION = "enable_return_routed_experts"


class RoutedExpertsStart(PartStart):
    option = OPTION

    def __init__(self, start: StartContext) -> None:
        self._start = start
        architecture = start.model_config.architecture
        mixtures = [module for module in start.model.modules() if isinstance(module, SparseMLP)]
        experts = [module for module in start.model.modules() if isinstance(module, Experts)]
        if not experts:
            raise ConfigError(f"{OPTION}: {architecture} has no mixture of experts", param=OPTION)
        if len(experts) != len(mixtures):
            raise ConfigError(
                f"{OPTION}: the routers of {architecture} are those of transformers, and are not "
                "read",
                param=OPTION,
            )
        top_k = {mixture.rule.top_k for mixture in mixtures}
        if len(top_k) > 1:
            raise ConfigError(
                f"{OPTION}: the layers of {architecture} choose different numbers of experts "
                f"({', '.join(map(str, sorted(top_k)))})",
                param=OPTION,
            )
        whole = [layer for layer in start.layers if layer.cache_spec(start.kv_dtype).reach is None]
        if not whole:
            raise ConfigError(
                f"{OPTION}: no layer of {architecture} caches whole sequences, so that cached "
                "tokens have no place of their own",
                param=OPTION,
            )
        self._layer: CacheLayer = whole[0]
        self._mixtures = mixtures

    def make(self, site: PartSite) -> RoutedExperts:
        start, first = self._start, self._mixtures[0]
        experts = [mixture.experts for mixture in self._mixtures]
        return RoutedExperts(
            experts, first.rule.top_k, self._num_experts, self._layer, site.batch.max_tokens,
            start.device, reports=start.ranks.tensor.rank == 0,
        )  # fmt: skip

    @property
    def _num_experts(self) -> int:
        return max(mixture.num_choices for mixture in self._mixtures)

    def complete(self, num_blocks: int) -> Mapping[str, Any]:
        top_k = self._mixtures[0].rule.top_k
        shape = RoutedShape(len(self._mixtures), top_k, self._num_experts, self._layer.group)
        return {"routed_experts": shape}


class RoutedExperts(WorkerPart):
    """Reads the choices of all tokens of a step, in recorded steps, too: layers write them to
    memory that stays."""

    name = NAME

    def __init__(
        self,
        experts: Sequence[Experts],
        top_k: int,
        num_experts: int,
        layer: CacheLayer,
        max_tokens: int,
        device: torch.device,
        *,
        reports: bool,
    ) -> None:
        """layer: whose cache has the tokens' places. reports: this rank does."""
        # torch has few operations for uint16, whose bits these are: no layer has 2^15 experts.
        dtype = torch.uint8 if num_experts <= 1 << 8 else torch.int16
        size = (max_tokens, len(experts), top_k)
        self._chosen = torch.zeros(size, dtype=dtype, device=device)
        self._places = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._layer, self._reports = layer, reports
        for number, each in enumerate(experts):
            each.chosen = self._chosen[:, number]

    def computed(self, inputs: StepInputs, hidden: HiddenStates) -> None:
        places = inputs.layouts[self._layer.group].slot_mapping[: len(self._places)]
        self._places[: len(places)].copy_(places)

    def after(self, part: PartPlan | None, step: LaunchedStep) -> Report | None:
        """Copy them before the next step writes others."""
        if not self._reports:
            return None
        count = sum(step.plan.num_tokens)
        copies = to_host({"places": self._places[:count], "experts": self._chosen[:count]})
        copied: Any = None
        if self._places.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()

        def report() -> RoutedTokens:
            if copied is not None:
                copied.synchronize()
            return RoutedTokens(copies["places"].tobytes(), copies["experts"].tobytes())

        return report
