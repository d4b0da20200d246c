"""A launched step: what comes back from the device, and the result that becomes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from ..step import StepPlan, StepResult, TokenLogprobs
from .graphs.written_tokens import TokenPlace

Reports: TypeAlias = dict[str, Callable[[], msgspec.Struct | None]]
"""Name of a part → what it reports, once the step is done."""


class DraftCounts(NamedTuple):
    """The S sampling rows of a step with drafts, on the host."""

    rows: list[int]
    """[S] The plan's row of each."""
    counts: list[int]
    """[S] Drafts of each; its positions are one more, and follow those of the row before."""


LOGPROB_FIELDS = ("top_ids", "top_logprobs", "logprob", "rank")
"""As `sampling.logprobs.Logprobs` has them."""


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of a step's prompt tokens, of requests with the same number of top tokens.

    N positions, those of one row of the plan after those of another.
    """

    k: int
    spans: list[tuple[int, int]]
    """Row of the plan, and its number of positions."""
    tables: Mapping[str, Any]
    """Arrays or tensors: LOGPROB_FIELDS, and `targets` [N]: the tokens themselves."""

    def by_row(self) -> Iterator[tuple[int, list[TokenLogprobs]]]:
        """Yield each row of the plan with its positions. Call once the copies are done."""
        lists = {name: table.tolist() for name, table in self.tables.items()}
        targets, end = lists["targets"], 0
        for row, count in self.spans:
            begin, end = end, end + count
            yield (
                row,
                [_position(lists, index, targets[index], self.k) for index in range(begin, end)],
            )


@dataclass
class LaunchedStep:
    """A step in flight on the device; `wait` turns it into a StepResult."""

    plan: StepPlan
    sample_rows: Sequence[int]
    wanted_logprobs: dict[int, int]
    """Row of the plan → k."""
    output: Mapping[str, np.ndarray]
    """Copies on the host, once the step is done; without tokens if they have a place."""
    prompt_scores: Sequence[PromptScores]
    event: Any
    launched: float = 0.0
    """When the launch began, by `time.monotonic`."""
    place: TokenPlace | None = None
    """Where the step itself writes its tokens."""
    keep: list[Any] = field(default_factory=list)
    """Device tensors that the copies read; held until they are done."""
    failed: dict[int, str] = field(default_factory=dict)
    """Row of the plan → why it failed before it was sampled."""
    failed_params: dict[int, str] = field(default_factory=dict)
    """As in `StepResult`."""
    drafted: DraftCounts | None = None
    """Set if rows have drafts; `output` then has `verdicts` [S, 2]: accepted drafts of each row,
    and those that the speculator had proposed."""
    verified: list[int] = field(default_factory=list)
    """[num_rows] Drafts of each row that the speculator had proposed, once the step is done; [] if
    no row had any."""
    reports: Reports = field(default_factory=dict)
    late_preparations: int = 0
    graph_recording_failures: int = 0
    launch_wait_seconds: float = 0.0
    """These three as in `StepResult`."""

    def chosen_tokens(self) -> list[int]:
        """Block until the tokens are on the host: [num sampling rows], -1 where none could be
        sampled."""
        if self.event is not None:
            self.event.synchronize()
        return self._sampled()

    def _sampled(self) -> list[int]:
        chosen = self.output["chosen"] if self.place is None else self.place.tokens()
        rows = self.sample_rows
        if len(chosen) != len(rows):
            # A recorded step samples for all of its rows, and has room for more.
            chosen = chosen[: len(rows)] if rows[-1] == len(rows) - 1 else chosen[rows]
        tokens: list[int] = chosen.tolist()
        return tokens

    def wait(self) -> StepResult:
        """Block until the copies to the host are done."""
        if self.event is not None:
            self.event.synchronize()
        self.keep.clear()
        failed = dict(self.failed)
        chosen = self._sampled() if self.sample_rows else []
        rows: Sequence[int] = self.sample_rows
        places: Sequence[int] = range(len(chosen))
        if self.drafted is not None:
            places, self.verified = self._kept(self.drafted)
            rows, chosen = [rows[at] for at in places], [chosen[at] for at in places]
        if chosen and min(chosen) < 0:
            for row, token in zip(rows, chosen, strict=True):
                if token < 0 and row not in failed:
                    failed[row] = "no token can be chosen: NaN logits, or every token is masked"
        num_rows, token_ids = len(self.plan.slots), chosen
        if self.drafted is None and len(rows) == num_rows:
            counts = [1] * num_rows
        else:
            counts = np.bincount(np.asarray(rows, dtype=np.intp), minlength=num_rows).tolist()
        if failed:
            for row in failed:
                counts[row] = 0
            sampled = zip(rows, chosen, strict=True)
            token_ids = [token for row, token in sampled if row not in failed]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if wanted := self.wanted_logprobs:
            scored = [number for number, row in enumerate(rows) if row in wanted and counts[row]]
            # A recorded step has results for all of its rows.
            whole = len(self.output["rank"]) != len(self.sample_rows)
            at = [(rows if whole else places)[number] for number in scored]
            tables = {name: self.output[name][at].tolist() for name in LOGPROB_FIELDS}
            for index, number in enumerate(scored):
                row = rows[number]
                position = _position(tables, index, chosen[number], wanted[row])
                logprobs.setdefault(row, []).append(position)
        prompts = dict(scored for scores in self.prompt_scores for scored in scores.by_row())
        return StepResult(
            step=self.plan.step,
            counts=counts,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompts,
            failed=failed,
            failed_params=self.failed_params,
            parts=reported(self.reports),
            device_seconds=time.monotonic() - self.launched,
            late_preparations=self.late_preparations,
            graph_recording_failures=self.graph_recording_failures,
            launch_wait_seconds=self.launch_wait_seconds,
        )

    def _kept(self, drafted: DraftCounts) -> tuple[list[int], list[int]]:
        """Return which of the sampled tokens are kept: a row's accepted drafts, and one more; and
        by row of the plan, how many drafts it had."""
        kept: list[int] = []
        verified = [0] * len(self.plan.slots)
        verdicts = self.output["verdicts"].tolist()
        first = 0
        for row, count, verdict in zip(drafted.rows, drafted.counts, verdicts, strict=True):
            accepted, verified[row] = verdict
            kept += range(first, first + accepted + 1)
            first += count + 1
        return kept, verified


@dataclass
class EmptyStep:
    """A plan without rows: it changed slots, or carried something for parts."""

    plan: StepPlan
    reports: Reports = field(default_factory=dict)

    def wait(self) -> StepResult:
        """Return a result without rows; nothing was launched."""
        return StepResult(self.plan.step, [], [], parts=reported(self.reports))


def reported(reports: Reports) -> dict[str, msgspec.Struct]:
    """Return what parts report of a step that is done."""
    structs = ((name, report()) for name, report in reports.items())
    return {name: struct for name, struct in structs if struct is not None}


def _position(tables: dict[str, Any], index: int, token_id: int, k: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=token_id,
        logprob=tables["logprob"][index],
        rank=tables["rank"][index],
        top_ids=tables["top_ids"][index][:k],
        top_logprobs=tables["top_logprobs"][index][:k],
    )
