"""Steps that nobody asked for: to compile kernels, to warm up, to see what memory a step takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from ..config import EngineConfig
from ..nn.operations import Operations
from ..types import SamplingParams, SlotStart
from .batch import StepRows
from .graphs import DecodeGraphs, row_counts
from .masks import TokenMask
from .mixed_graphs import MixedGraphs
from .pooling import PoolingRunner
from .runner import ModelRunner
from .sampler import sample_outputs

logger = logging.getLogger("jackfield.worker")


class StepGraphs(NamedTuple):
    """What records steps."""

    decode: DecodeGraphs
    mixed: MixedGraphs | None
    """None: the attention backend cannot be recorded with prompts."""


MIXED_ROWS = 64
"""Up to so many decode rows are rehearsed with a prompt behind them."""


class TrialSteps:
    """Runs them, on the launch thread."""

    def __init__(
        self,
        runner: ModelRunner | PoolingRunner,
        config: EngineConfig,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """`config` is resolved: `max_num_batched_tokens` is concrete."""
        assert config.max_num_batched_tokens is not None
        self._runner = runner
        self._config = config
        self._max_model_len = max_model_len
        self._budget: int = config.max_num_batched_tokens
        self._device = device
        self._short_prompts = [4, 16, 32]
        """Numbers of tokens whose kernels are compiled when there is time."""

    def rehearse(self, operations: Operations, graphs: StepGraphs | None = None) -> None:
        """Have what steps launch compiled side by side, before the first of them is launched.

        Nothing depends on it: what is not compiled here is when it is launched.
        """
        rehearsal = operations.rehearse(self._device)
        if rehearsal is None:
            return
        try:
            with rehearsal as kernels:
                # No library has a part in these, or a small one: compilers have work at once.
                for num_tokens in (1, min(32, self._budget)):
                    self._alone(num_tokens)
                if graphs is not None:
                    graphs.decode.rehearse(1)
                    if graphs.mixed is not None:
                        graphs.mixed.rehearse(graphs.mixed.rehearsed_keys()[0])
                if kernels.compiles():
                    self._rehearse_more(graphs)
        except Exception:
            # Where it is not the rehearsal's own, it comes again.
            logger.info("kernels compile one by one: a rehearsal failed", exc_info=True)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _rehearse_more(self, graphs: StepGraphs | None) -> None:
        """Every kind of step: short prompts, decode steps, decode steps with a prompt behind."""
        self.warm_up()
        if isinstance(self._runner, ModelRunner):
            for num_tokens in self._short_prompts:
                self._alone(num_tokens)
            for rows in row_counts(self._config.max_num_seqs):
                if graphs is not None:
                    graphs.decode.rehearse(rows)
                else:
                    self.run([1] * rows, range(rows))
                if rows <= MIXED_ROWS and (graphs is None or graphs.mixed is None):
                    self.run([1] * rows + [self._long_prompt()], range(rows + 1))
        if graphs is not None and graphs.mixed is not None:
            for key in graphs.mixed.rehearsed_keys():
                graphs.mixed.rehearse(key)
        # What libraries load for many tokens is loaded while compilers work.
        self.run_largest()

    def warm_up(self) -> None:
        """Run one prefill and one decode step on the null block, so that kernels are compiled."""
        for num_tokens in (self._long_prompt(), 1):
            self._alone(num_tokens)

    def run_short_prompt(self) -> bool:
        """A prompt of one more of the short lengths; False: there was none left."""
        if not self._short_prompts:
            return False
        self._alone(self._short_prompts.pop())
        return True

    def run_largest(self) -> None:
        """The whole budget, in as many rows as may run."""
        num_rows = min(self._config.max_num_seqs, self._budget)
        each, more = divmod(self._budget, num_rows)
        self.run([each + 1] * more + [each] * (num_rows - more), range(num_rows))

    def _alone(self, num_tokens: int) -> None:
        """A prompt in the scratch slot."""
        self.run([num_tokens], [self._config.max_num_seqs])

    def _long_prompt(self) -> int:
        return min(512, self._budget, self._max_model_len)

    def run(self, row_lengths: Sequence[int], use_slots: Sequence[int]) -> None:
        """A forward pass over the null block, and sampling: plain, and with every costly stage on.

        row_lengths: tokens of each row; use_slots: a slot for each. Once requests may be there, the
        scratch slot (max_num_seqs) is the only one that is nobody's.
        """
        runner = self._runner
        slots = list(use_slots)
        num_rows = len(slots)
        counts = np.minimum(np.asarray(row_lengths, dtype=np.int32), self._max_model_len)
        host_slots = np.asarray(slots, dtype=np.int32)
        rows = StepRows.of(host_slots, np.zeros_like(host_slots), counts, host_slots)
        # A write, too: into the number that belongs to no slot.
        nowhere = np.asarray([[runner.batch.storage.shape[0] - 1, 0]], dtype=np.int32)
        inputs = runner.batch.lay_out(rows, np.arange(num_rows, dtype=np.int32), nowhere)
        layout = inputs.layout
        # In a rehearsal nothing has filled them, and torch looks where they say.
        for places in (inputs.input_ids, layout.slot_mapping, layout.block_table):
            places.zero_()
        device = self._device
        starts = rows.query_start[:-1].repeat(counts)
        positions = np.arange(layout.num_tokens, dtype=np.int64) - starts
        inputs.positions.copy_(torch.from_numpy(positions))
        layout.seq_lens.copy_(torch.from_numpy(rows.seq_lens))
        inputs.sample_slots.copy_(torch.from_numpy(host_slots))
        inputs.sample_lengths.fill_(1)
        index = torch.arange(num_rows, device=device)
        if isinstance(runner, PoolingRunner):
            runner.pool_all(runner.forward(inputs))
            return
        params = SamplingParams(temperature=0.8, top_p=0.9, top_k=50)
        for slot in slots:
            runner.sampling.start(
                SlotStart(
                    slot=slot,
                    request_id="warm-up",
                    token_ids=(0,),
                    num_prompt_tokens=1,
                    num_computed_tokens=0,
                    block_ids=(),
                    params=params,
                    seed=0,
                )
            )
        runner.sampling.upload()
        logits = runner.logits(runner.forward(inputs)[index])
        words = -(-runner.vocab_size // 32)
        mask = TokenMask(
            torch.full((num_rows, words), -1, dtype=torch.int32, device=device), index, index
        )
        sampler = runner.sampler
        out = sample_outputs(num_rows, device)
        if not sampler.sample_step(logits, inputs.sample_slots, inputs.sample_lengths, out, mask):
            sampler.sample(logits, inputs.sample_slots, slots, inputs.sample_lengths)
            for table in (logits, logits.float()):
                sampler.mask(table, mask)
                sampler.mask(table, replace(mask, rows=None))
        sampler.sample_plain(logits, inputs.sample_slots, inputs.sample_lengths, out)
        sampler.rehearse_processed(logits, inputs.sample_slots, inputs.sample_lengths, out)
        for slot in slots:
            runner.sampling.release(slot)
        runner.sampling.upload()
