"""The launch of steps whose rows have drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...parts.speculation import NAME, DraftPlan
from ...step import StepPlan
from ..batch import LogitPlaces, LogitRows
from ..graphs.draft_graphs import DraftGraphs
from ..graphs.endings import Ending
from ..hidden_states import take
from ..launched_step import DraftCounts, LaunchedStep
from ..sampled import SamplingRows
from ..sampling.rejection import DrawnDrafts
from ..sampling.rounds import DraftPlaces

if TYPE_CHECKING:
    from ..runner import ModelRunner
    from .draft_verifier import DraftedRows, DraftVerifier


class Verification:
    """The drafts of a launched step."""

    def __init__(self, verifier: DraftVerifier, drafted: DraftedRows) -> None:
        self._verifier = verifier
        self._drafted = drafted
        self.counts = drafted.host

    def limit(self, limits: torch.Tensor) -> None:
        self._verifier.limit(self._drafted, limits)

    def places(self) -> DraftPlaces | None:
        return self._verifier.places(self._drafted)

    @property
    def drawn(self) -> DrawnDrafts | None:
        return self._drafted.drawn

    def verify(self, chosen: torch.Tensor) -> torch.Tensor:
        return self._verifier.verify(self._drafted, chosen)


class DraftedRoute:
    """Uses one graph if all rows have as many drafts, else a graph of the forward pass, as for
    prompts.
    """

    def __init__(self, runner: ModelRunner, verifier: DraftVerifier) -> None:
        self._runner = runner
        self._verifier = verifier
        self.graphs: dict[tuple[str | None, int], DraftGraphs] = {}
        """By the variant of recorded steps and the drafts of each row, once they are recorded."""

    def launch(self, plan: StepPlan) -> LaunchedStep | None:
        part: DraftPlan | None = plan.parts.get(NAME)
        if part is None or not part.num_drafts or not self._runner.samples:
            return None  # Other stages compute such rows like prompts.
        return self._replay(plan, part) or self._launch(plan)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        runner, verifier = self._runner, self._verifier
        batch = runner.batch
        writes = batch.table.writes(plan)
        rows = batch.rows(plan)
        hidden = runner.mixed.forward(plan, rows, writes)
        if hidden is None:
            hidden = runner.forward(
                batch.lay_out(rows, LogitRows.sampled(rows, plan.samples), writes)
            )
        runner.upload()
        scores = runner.prompt_logprobs.score(rows, hidden)
        drafted = verifier.rows(plan, rows)
        slots_host = [plan.slots[row] for row in drafted.logit_rows]
        sampling = SamplingRows(drafted.logit_rows, slots_host, drafted.slots, drafted.lengths)
        places = LogitPlaces(drafted.slots, drafted.lengths, slots_host)
        logits = runner.logits(take(hidden, drafted.logit_tokens), places=places)
        return runner.sample(
            plan, logits, sampling, scores,
            drafted=Verification(verifier, drafted),
        )  # fmt: skip

    def _replay(self, plan: StepPlan, part: DraftPlan) -> LaunchedStep | None:
        """Run a step from a graph of rows with drafts; None if none serves it."""
        runner, rows_host = self._runner, list(plan.slots)
        graphs = self.graphs.get((runner.parts.graph_key(plan), part.num_drafts[0]))
        if graphs is None or not runner.parts.recordable(plan):
            return None
        if (ending := runner.ending(rows_host)) is Ending.LOGITS:
            return None
        if any(map(runner.sampling.depends_on_output, rows_host)):
            return None  # Positions are sampled one after another.
        runner.upload()
        if not graphs.launch(plan, part.num_drafts, ending):
            return None
        rows = list(range(len(rows_host)))
        positions = [row for row in rows for _ in range(graphs.width)]
        slots = [rows_host[row] for row in positions]
        outputs = graphs.outputs.first(len(positions))
        sampled = runner.recorded(outputs, positions, slots)
        verdicts = sampled.tensors["verdicts"] = graphs.verdicts[: len(rows)]
        runner.parts.drafts_verified(plan, verdicts[:, 0])
        drafted = DraftCounts(rows, [graphs.width - 1] * len(rows))
        return runner.copy_back(plan, sampled=sampled, drafted=drafted)
