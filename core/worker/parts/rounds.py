"""Rounds: steps in which this engine's ranks compute for other engines' tokens, too."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ConfigError
from ...nn.experts import Experts, SparseMLP
from ...parallel.round import Round
from ...parts.rounds import NAME, RoundResult
from ...step import PartPlan, StepPlan
from .part import PartSite, PartStart, Report, StartContext, WorkerPart

OPTION = "enable_expert_parallel"


class RoundsStart(PartStart):
    option = OPTION

    def __init__(self, start: StartContext) -> None:
        self._mixtures = [each for each in start.model.modules() if isinstance(each, SparseMLP)]
        experts = [each for each in start.model.modules() if isinstance(each, Experts)]
        if len(experts) != len(self._mixtures):
            raise ConfigError(
                f"{OPTION}: mixtures of {start.model_config.architecture} are not divided among "
                "engines yet; divide them among the ranks of one (tensor_parallel_size)",
                param=OPTION,
            )
        assert start.ranks.round is not None, "it has joined the other engines"
        self._round = start.ranks.round

    def make(self, site: PartSite) -> Rounds:
        return Rounds(self._round, self._mixtures)


class Rounds(WorkerPart):
    """Begins each step together with the other engines."""

    name = NAME

    def __init__(self, round: Round, mixtures: Sequence[SparseMLP]) -> None:
        self._round, self._mixtures = round, mixtures
        self._num_tokens = 0

    def before(self, part: PartPlan | None, plan: StepPlan) -> None:
        """Wait for the other engines. Without rows, do here what layers do otherwise."""
        self._num_tokens = self._round.begin(plan.total_tokens)
        if self._num_tokens and not plan.slots:
            for mixture in self._mixtures:
                mixture.compute_for_others()

    def poll(self) -> Report | None:
        """Report the round, whose layers are launched."""
        self._round.end()
        result = RoundResult(self._num_tokens)
        return lambda: result
