"""A launched step, and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from ..step import NO_TOKEN, StepPlan, StepResult, TokenLogprobs
from .graphs.written_tokens import TokenPlace

Reports: TypeAlias = dict[str, Callable[[], msgspec.Struct | None]]
"""Name of a part → its report, once the step is done."""


class DraftCounts(NamedTuple):
    """The S sampling rows of a step with drafts."""

    rows: list[int]
    """[S] Rows of the plan."""
    counts: list[int]
    """[S] Drafts; a row has one more position, after the previous row's."""


LOGPROB_FIELDS = ("top_ids", "top_logprobs", "logprob", "rank")
"""As in `sampling.logprobs.Logprobs`."""


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of prompt tokens, for requests with the same number of top tokens.

    N positions, row by row.
    """

    k: int
    spans: list[tuple[int, int]]
    """Row of the plan, and number of positions."""
    tables: Mapping[str, Any]
    """LOGPROB_FIELDS, and `targets` [N]: the tokens."""

    def by_row(self) -> Iterator[tuple[int, list[TokenLogprobs]]]:
        """Yield each row with its positions, after the copies."""
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
    """A step in flight; `wait` returns its StepResult."""

    plan: StepPlan
    sample_rows: Sequence[int]
    wanted_logprobs: dict[int, int]
    """Row of the plan → k."""
    output: Mapping[str, np.ndarray]
    """On the host, once done; without tokens if these have a place."""
    prompt_scores: Sequence[PromptScores]
    event: Any
    launched: float = 0.0
    """Start of the launch, by `time.monotonic`."""
    place: TokenPlace | None = None
    """Where the step writes its tokens."""
    keep: list[Any] = field(default_factory=list)
    """Device tensors being copied."""
    failed: dict[int, str] = field(default_factory=dict)
    """Row → failure before sampling."""
    failed_params: dict[int, str] = field(default_factory=dict)
    """As in `StepResult`."""
    drafted: DraftCounts | None = None
    """With drafts; `output` then has `verdicts` [S, 2]: accepted and proposed drafts."""
    verified: list[int] = field(default_factory=list)
    """[num_rows] Proposed drafts, once done; [] for none."""
    proposal_rows: Sequence[int] = ()
    """[P] Rows of the plan with new drafts: `output` then has `proposed` [P], their numbers, and
    `drafts` [P, K], the drafts, if a row has a grammar."""
    reports: Reports = field(default_factory=dict)
    late_preparations: int = 0
    graph_recording_failures: int = 0
    launch_wait_seconds: float = 0.0
    """These three as in `StepResult`."""

    def kept_tokens(self) -> list[list[int]]:
        """Block until the tokens are on the host, and return those of each sampling row, [-1] for
        failures.
        """
        if self.event is not None:
            self.event.synchronize()
        chosen = self._sampled()
        if self.drafted is None:
            return [[token] for token in chosen]
        kept, first = [], 0
        for count, (accepted, _) in zip(self.drafted.counts, self._verdicts(), strict=True):
            kept.append(chosen[first : first + accepted + 1])
            first += count + 1
        return kept

    def proposals(self) -> list[list[int]] | None:
        """Return the drafts proposed after each sampling row's tokens, once they are on the host;
        None: there are none, or no row has a grammar.
        """
        if "drafts" not in self.output:
            return None
        drafts, numbers = self.output["drafts"].tolist(), self.output["proposed"].tolist()
        by_row = {
            row: ids[:number]
            for row, ids, number in zip(self.proposal_rows, drafts, numbers, strict=True)
        }
        rows = self.sample_rows if self.drafted is None else self.drafted.rows
        return [by_row.get(row, []) for row in rows]

    def _verdicts(self) -> list[list[int]]:
        verdicts: list[list[int]] = self.output["verdicts"].tolist()
        return verdicts

    def _sampled(self) -> list[int]:
        chosen = self.output["chosen"] if self.place is None else self.place.tokens()
        rows = self.sample_rows
        if len(chosen) != len(rows):
            # A recorded step samples for all of its rows, and has room for more.
            chosen = chosen[: len(rows)] if rows[-1] == len(rows) - 1 else chosen[rows]
        tokens: list[int] = chosen.tolist()
        return tokens

    def wait(self) -> StepResult:
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
                    failed[row] = NO_TOKEN
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
        if num_logprobs := self.wanted_logprobs:
            scored = [
                number for number, row in enumerate(rows) if row in num_logprobs and counts[row]
            ]
            # A recorded step has results for all of its rows.
            whole = len(self.output["rank"]) != len(self.sample_rows)
            at = [(rows if whole else places)[number] for number in scored]
            tables = {name: self.output[name][at].tolist() for name in LOGPROB_FIELDS}
            for index, number in enumerate(scored):
                row = rows[number]
                position = _position(tables, index, chosen[number], num_logprobs[row])
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
        """Return the indices of kept tokens (accepted drafts and one more), and each row's
        drafts.
        """
        kept: list[int] = []
        verified = [0] * len(self.plan.slots)
        first = 0
        for row, count, verdict in zip(drafted.rows, drafted.counts, self._verdicts(), strict=True):
            accepted, verified[row] = verdict
            kept += range(first, first + accepted + 1)
            first += count + 1
        return kept, verified


@dataclass
class EmptyStep:
    """A plan without rows: slot changes, or parts' data."""

    plan: StepPlan
    reports: Reports = field(default_factory=dict)

    def wait(self) -> StepResult:
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
