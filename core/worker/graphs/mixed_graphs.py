"""Steps with prompts as recorded graphs.

A step has decode rows, then prompts of any length. The device reads what differs from a static
int32 array. Graphs are recorded by tokens and maximum of decode rows; smaller steps are padded with
the scratch slot. Each row's last state goes to a static tensor, from which a second graph, recorded
by rows, computes logits and samples.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...protocols.attention import PagedBackend
from ...protocols.models import HiddenStates
from ..batch import LogitPlaces, PersistentBatch, StepInputs, StepRows
from ..hidden_states import each, parts
from ..sampling.sampler import Sampler
from .endings import Ending, count_run, row_counts, sample_rows
from .mixed_inputs import MixedInputs, MixedKey, StepShape, shape_of
from .recorder import Losses, Recorder, Replay
from .written_tokens import WrittenTokens

logger = logging.getLogger("jackfield.worker")

FIRST_TOKENS = frozenset({128, 256, 512, 1024, 2048, 4096})
"""Tokens of steps without decode rows that are recorded first."""
STRIDE = 512
"""Distance between the next recorded numbers of tokens."""
MAX_TOKENS = 8192
"""Tokens of the largest recorded step; beyond, the device hides the launches."""
RUN_FIRST = 512
"""Steps up to this size run once before they are recorded."""
FREE_TOKENS = 256
"""Tokens that take about as long as fewer: a step reads all weights anyway."""


def token_counts(max_tokens: int) -> list[int]:
    """Return numbers of tokens to record: within a quarter up to 512, every 32 up to 640 (common
    prompts beside decode rows), every 64 up to 1,280 (`SHORT_STEP_SECONDS`), then every 256.
    """
    counts = [16, 32, *range(64, 256, 32), *range(256, 512, 64), *range(512, 640, 32)]
    counts += range(640, 1280, 64)
    counts += range(1280, MAX_TOKENS + 1, 256)
    return [n for n in counts if n < max_tokens] + [max_tokens]


def decode_row_counts(max_num_seqs: int) -> list[int]:
    """Return maxima of decode rows to record: none, and a few far apart."""
    return [0, *(n for n in (16, 64) if n < max_num_seqs), max_num_seqs]


class MixedGraphs:
    def __init__(
        self,
        *,
        forward: Callable[[StepInputs], HiddenStates],
        logits: Callable[[HiddenStates, Ending, LogitPlaces], torch.Tensor],
        batch: PersistentBatch,
        backend: PagedBackend,
        sampler: Sampler,
        record: Recorder,
        max_tokens: int,
        endings: Sequence[Ending],
        errors: type[Exception],
        in_traffic: bool,
        written: WrittenTokens | None = None,
    ) -> None:
        """`forward`: inputs → hidden states of T tokens; `logits`: R rows' states → what an ending
        samples from; `max_tokens`: of any step; `endings`: to record, in order; `errors`: of
        recordings, on all ranks; `in_traffic`: whether a launch may first run another step;
        `written`: gets tokens, besides `outputs`.
        """
        self._forward = forward
        self._logits = logits
        self._batch = batch
        self._backend = backend
        self._sampler = sampler
        self._written = written
        self._record = record
        self._errors, self._in_traffic = errors, in_traffic
        self._kinds = [ending for ending in endings if ending is not Ending.STATES]
        self._token_counts = token_counts(min(max_tokens, MAX_TOKENS))
        self._decode_counts = decode_row_counts(batch.num_slots)
        self._row_counts = row_counts(batch.num_slots)
        self._steps: dict[MixedKey, Replay] = {}
        self._endings: dict[tuple[int, Ending], Replay] = {}
        self._losses = Losses()
        self.num_recorded = 0
        max_rows = self._num_rows(MixedKey(self._decode_counts[-1], self._token_counts[-1]))
        self._inputs = MixedInputs(batch, max_rows)
        device = batch.device
        self._slots = torch.full((max_rows,), batch.scratch_slot, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._last_states: HiddenStates = torch.empty(0, device=device)
        """Last states of max_rows rows; allocated by the first step."""
        self.states: HiddenStates = torch.empty(0, device=device)
        """The last step's states of max_tokens rows."""
        self.outputs = sampler.outputs
        """The last step's tokens, unless it ended with logits."""
        self.logits = torch.empty(0, device=device)
        """[max_num_seqs, vocab_size] Logits of the last step without sampling."""

    # ------------------------------------------------------------ serving a step

    def launch(self, rows: StepRows, writes: np.ndarray) -> bool:
        """Replay a step up to each row's last state; False, unchanged, without a graph."""
        if self._backend.prefers_launch(rows.query_lens, rows.seq_lens):
            return False
        shape = shape_of(rows)
        key = self._serving(shape)
        if key is None:
            return False
        self._inputs.fill(rows, writes, shape, key)
        self._steps[key]()
        return True

    def finish(self, num_rows: int, ending: Ending) -> None:
        """Replay the last step's logits, with sampling (to `outputs`) or without (to `logits`)."""
        candidates = (
            rows for rows in self._row_counts
            if num_rows <= rows <= self._filled_rows and (rows, ending) in self._endings
        )  # fmt: skip
        rows = next(candidates, None)
        if rows is None:
            rows = next(count for count in self._row_counts if count >= num_rows)
            self.record_ending(rows, ending)
        self._endings[rows, ending]()
        count_run(ending, self._written)

    def sampling_inputs(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last step's slots and lengths, [num_rows] int64."""
        return self._slots[:num_rows], self._lengths[:num_rows]

    @property
    def _filled_rows(self) -> int:
        """Rows set by the last step, with padding."""
        return self._num_rows(self._inputs.key)

    def _serving(self, shape: StepShape) -> MixedKey | None:
        """Return the graph that serves a step with least padding, recording one if enough was lost:
        that takes several steps' time, but a busy server would otherwise never record it.
        """
        best = self._smallest_key(shape)
        if best in self._steps:
            return best
        candidates = (
            key for key in self._steps if key.tokens >= shape.tokens and self._fits(key, shape)
        )
        key = min(candidates, key=lambda key: (key.tokens, key.decode_rows), default=None)
        if best is None or not self._in_traffic:
            return key
        # One for any number of decode rows serves more steps, and costs about the same.
        widest = MixedKey(self._decode_counts[-1], best.tokens)
        target = widest if best.decode_rows and self._fits(widest, shape) else best
        padding = target.tokens if key is None else key.tokens - target.tokens
        if not self._losses.is_due(target, padding / max(target.tokens, FREE_TOKENS)):
            return key
        try:
            self.record(target)
        except self._errors:
            logger.warning("%s cannot be recorded; such steps go on without", target,
                           exc_info=True)  # fmt: skip
            return key
        return target

    def _smallest_key(self, shape: StepShape) -> MixedKey | None:
        """Return the smallest possible graph for a step."""
        decode_rows = next(n for n in self._decode_counts if n >= shape.decode_rows)
        first = bisect.bisect_left(self._token_counts, shape.tokens)
        for tokens in self._token_counts[first:]:
            key = MixedKey(decode_rows, tokens)
            if self._fits(key, shape):
                return key
            if tokens > 2 * shape.tokens + 16:
                break
        return None

    def _fits(self, key: MixedKey, shape: StepShape) -> bool:
        padding = -(-(key.tokens - shape.tokens) // self._batch.max_model_len)
        return (
            shape.decode_rows <= key.decode_rows
            and key.decode_rows < key.tokens
            and shape.prompt_rows + padding <= key.prompt_rows
        )

    def _num_rows(self, key: MixedKey) -> int:
        """Return a graph's rows: at least those read by the ending."""
        rows = key.decode_rows + key.prompt_rows
        return max(rows, next((n for n in self._row_counts if n >= rows), self._row_counts[-1]))

    # ------------------------------------------------------------ recording

    def missing(self) -> list[MixedKey | tuple[int, Ending]]:
        """Return what to record, in order: the largest step, which serves what is not recorded yet,
        plain endings, a few numbers of tokens far apart, other endings, then by halves.
        """
        keys = [
            MixedKey(rows, tokens)
            for tokens in self._token_counts
            for rows in self._decode_counts
            if self._fits(MixedKey(rows, tokens), StepShape(0, 0, 0))
        ]
        stride = 1 << (len(self._token_counts).bit_length() - 1)
        place = {n: at for at, n in enumerate(reversed(self._token_counts))}

        def rank(key: MixedKey) -> int:
            at, step = place[key.tokens], stride
            while at % step:
                step //= 2
            return stride // step

        most = self._decode_counts[-1]
        alone = [key for key in keys if not key.decode_rows and key.tokens in FIRST_TOKENS]
        mixed = [key for key in keys if key.decode_rows == most]
        far_apart = [key for key in mixed if not key.tokens % STRIDE]
        far_apart.sort(key=lambda key: (key.tokens.bit_count(), rank(key)))
        rest = sorted(keys, key=rank)
        halves = [n for n in self._row_counts if n.bit_count() == 1 or n == self._row_counts[-1]]
        order = halves[::-1] + [n for n in reversed(self._row_counts) if n not in halves]
        endings = [(rows, ending) for ending in self._kinds for rows in order]
        few = [each for each in endings if each[0] in halves]
        plain = [each for each in few if each[1] is self._kinds[0]]
        graph_keys: list[MixedKey | tuple[int, Ending]] = [
            *mixed[-1:], *plain, *far_apart, *few, *alone, *mixed, *endings, *rest,
        ]  # fmt: skip
        return [
            each for each in dict.fromkeys(graph_keys)
            if each not in self._steps and each not in self._endings
        ]  # fmt: skip

    def record_next(self) -> bool:
        missing = self.missing()
        if not missing:
            return False
        first = missing[0]
        if isinstance(first, MixedKey):
            self.record(first)
        else:
            self.record_ending(*first)
        return True

    def record_for(self, tokens: int) -> None:
        """Record the graphs for a single prompt of this size."""
        if (key := self._smallest_key(StepShape(0, 1, tokens))) is not None:
            self.record(key)
            for ending in self._kinds[:1]:
                self.record_ending(1, ending)

    def precompiled_keys(self) -> list[MixedKey]:
        """Return steps that together launch every kernel."""
        sizes = {16, 64, 128, 256, 512, 1024, 4096, self._token_counts[-1]}
        keys = [MixedKey(0, tokens) for tokens in self._token_counts if tokens in sizes]
        for rows in self._decode_counts[1:]:
            more = next((n for n in self._token_counts if n >= rows + 128), None)
            if more is not None:
                keys.append(MixedKey(rows, more))
        return [key for key in keys if self._fits(key, StepShape(0, 0, 0))]

    def _smallest(self) -> MixedKey:
        return MixedKey(0, self._token_counts[0])

    def record(self, key: MixedKey) -> None:
        start = time.monotonic()
        if not self._is_ready(key):
            self._run_once(key)
        try:
            replay = self._record(lambda: self._step(key))
        except RuntimeError:
            logger.debug("%s has to run before it is recorded", key, exc_info=True)
            self._run_once(key)
            replay = self._record(lambda: self._step(key))
        self._steps[key] = replay
        self.num_recorded += 1
        logger.debug("recorded %s in %.3f s", key, time.monotonic() - start)

    def _is_ready(self, key: MixedKey) -> bool:
        """Whether a step's launches all ran before: larger steps launch the same kernels."""
        return key.tokens > RUN_FIRST and any(
            done.decode_rows == key.decode_rows for done in self._steps
        )

    def _run_once(self, key: MixedKey) -> None:
        """Run a step, so that kernels are compiled and workspaces allocated."""
        self._inputs.fill_scratch(key)
        self._step(key)

    def record_ending(self, rows: int, ending: Ending) -> None:
        """Record logits, and usually tokens, of `rows` rows."""
        if not parts(self._last_states)[0].numel():
            self.record(self._smallest())
        slots, lengths = self._slots.clone(), self._lengths.clone()
        self._slots.fill_(self._batch.scratch_slot)
        self._lengths.zero_()
        self._end(rows, ending)
        count_run(ending, self._written)
        self._endings[rows, ending] = self._record(lambda: self._end(rows, ending))
        self._slots.copy_(slots)
        self._lengths.copy_(lengths)
        self.num_recorded += 1

    def precompile(self, key: MixedKey) -> None:
        """Run a step while kernels are only compiled."""
        self._inputs.fill_scratch(key)
        self._inputs.write(key)
        inputs = self._expand(key)
        # Written by kernels that did not run, but memory addresses that torch would dereference.
        for places in (
            inputs.input_ids, inputs.positions, inputs.sample_slots, inputs.sample_lengths,
            inputs.logit_tokens, *(part for layout in inputs.layouts for part in layout.places),
        ):  # fmt: skip
            places.zero_()
        self._compute(key, inputs)

    def _step(self, key: MixedKey) -> None:
        self._inputs.write(key)
        self._compute(key, self._expand(key))

    def _compute(self, key: MixedKey, inputs: StepInputs) -> None:
        states = self._forward(inputs)
        if not parts(self.states)[0].numel():
            self._last_states = _new_rows(states, len(self._slots))
            self.states = _new_rows(states, self._token_counts[-1])
        rows = len(inputs.logit_tokens)
        # All parts in one launch.
        torch._foreach_copy_(
            [whole[: key.tokens] for whole in parts(self.states)], list(parts(states))
        )
        for part, last in zip(parts(states), parts(self._last_states), strict=True):
            torch.index_select(part, 0, inputs.logit_tokens, out=last[:rows])
        # Both in one launch.
        torch._foreach_copy_(
            [self._slots[:rows], self._lengths[:rows]],
            [inputs.sample_slots, inputs.sample_lengths],
        )

    def _end(self, rows: int, ending: Ending) -> None:
        slots, lengths = self._slots[:rows], self._lengths[:rows]
        states = each(self._last_states, lambda part: part[:rows])
        logits = self._logits(states, ending, LogitPlaces(slots, lengths))
        if ending is not Ending.LOGITS:
            sample_rows(self._sampler, ending, logits, slots, lengths, self._written)
            return
        if not self.logits.numel():
            self.logits = logits.new_empty(self._row_counts[-1], logits.shape[1])
        self.logits[:rows].copy_(logits)

    def _expand(self, key: MixedKey) -> StepInputs:
        return self._inputs.expand(key, self._num_rows(key))


def _new_rows(states: HiddenStates, rows: int) -> HiddenStates:
    return each(states, lambda part: part.new_empty(rows, part.shape[1]))
