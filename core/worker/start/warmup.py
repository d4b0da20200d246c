"""Steps without requests: to compile, warm up, and measure memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch

from ...config import EngineConfig
from ...loading.model_config import ModelConfig
from ...nn.operations import Operations
from ...sampling_params import SamplingParams
from ...step import SlotStart
from ..batch import LogitPlaces, LogitRows, StepRows
from ..graphs.endings import Ending, row_counts
from ..hidden_states import take
from ..pooling_runner import PoolingRunner
from ..runner import ModelRunner
from ..sampling.masks import TokenMask
from ..sampling.sampler import sample_outputs
from .step_graphs import StepGraphs

logger = logging.getLogger("jackfield.worker")

MIXED_ROWS = 64
"""Most decode rows precompiled with a prompt."""
LATER_PARTS = (16, 32, 64, 512, 1024)
"""Tokens of prompt parts after cached tokens, to precompile. Beyond 512, heads that share no keys
may have another kernel, too."""


class Warmup:
    """Runs steps without requests on the launch thread."""

    def __init__(
        self,
        runner: ModelRunner | PoolingRunner,
        config: EngineConfig,
        model_config: ModelConfig,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """`config`: with a concrete `max_num_batched_tokens`."""
        assert config.max_num_batched_tokens is not None
        self._model_config = model_config
        self._runner = runner
        self._config = config
        self._max_model_len = max_model_len
        self._budget: int = config.max_num_batched_tokens
        self._device = device
        self._short_prompts = [4, 16, 32]
        """Prompt lengths compiled in spare time."""

    def precompile(self, operations: Operations, graphs: StepGraphs | None = None) -> None:
        """Compile all steps' kernels in parallel before the first launch, which would otherwise
        compile them.
        """
        precompiler = operations.precompile(self._device)
        if precompiler is None:
            return
        runner = self._runner
        try:
            with precompiler as kernels:
                if isinstance(runner, ModelRunner):
                    runner.precompiling = True
                # These steps call libraries little or not at all, so compilers have work at once.
                for num_tokens in (1, min(32, self._budget)):
                    self._alone(num_tokens)
                for variant in () if graphs is None else graphs.variants:
                    variant.decode.precompile(1)
                    if variant.mixed is not None:
                        variant.mixed.precompile(variant.mixed.precompiled_keys()[0])
                if kernels.lacks(what_decides_kernels(self._config, self._model_config)):
                    self._precompile_more(graphs)
        except Exception:
            # An error that is not due to precompilation itself occurs again at a launch.
            logger.info(
                "kernels compile at their first launch: precompilation failed", exc_info=True
            )
        finally:
            if isinstance(runner, ModelRunner):
                runner.precompiling = False
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _precompile_more(self, graphs: StepGraphs | None) -> None:
        """Precompile short prompts, and decode steps with and without a prompt."""
        self.warm_up()
        if isinstance(self._runner, ModelRunner):
            for num_tokens in self._short_prompts:
                self._alone(num_tokens)
            for num_tokens in dict.fromkeys(min(part, self._budget) for part in LATER_PARTS):
                self._alone(num_tokens, context=1)
            for rows in row_counts(self._config.max_num_seqs):
                for variant in () if graphs is None else graphs.variants:
                    variant.decode.precompile(rows)
                if graphs is None:
                    self.run([1] * rows, range(rows))
                if rows <= MIXED_ROWS and (graphs is None or graphs.mixed is None):
                    self.run([1] * rows + [self._long_prompt()], range(rows + 1))
        for variant in () if graphs is None else graphs.variants:
            for key in () if variant.mixed is None else variant.mixed.precompiled_keys():
                variant.mixed.precompile(key)  # type: ignore[union-attr]
        # Libraries load their kernels for many tokens while the compilers work.
        self.run_largest()

    def warm_up(self) -> None:
        """Run a prefill and a decode step on the null block, compiling kernels."""
        self._run_parts(self._long_prompt())
        for variant in (None, *self._runner.parts.variants):
            with self._runner.parts.recording(variant):
                for num_tokens in (self._long_prompt(), 1):
                    self._alone(num_tokens)

    def run_short_prompt(self) -> bool:
        """Run the next short prompt; False if none is left."""
        if not self._short_prompts:
            return False
        self._alone(self._short_prompts.pop())
        return True

    def run_largest(self) -> None:
        """Run a step of the whole token budget: as many prompts as possible, and the end of the
        longest text (two tokens, else it would decode), as memory may depend on the longest row,
        and on prompts with a context.
        """
        end = 0 if self._runner.backend is None else min(2, self._budget)
        rest = self._budget - end
        num_rows = min(self._config.max_num_seqs, rest)
        lengths = [rest // num_rows + (row < rest % num_rows) for row in range(num_rows)]
        slots = list(range(num_rows))
        if end:
            lengths.append(end)
            slots.append(self._config.max_num_seqs)
        self._run_parts(max(self._budget, self._max_model_len))
        for variant in (None, *self._runner.parts.variants):
            with self._runner.parts.recording(variant):
                self.run(lengths, slots, context=self._max_model_len if end else 0)

    def run_largest_parts(self) -> int:
        """Do what parts do at most besides steps. Return the bytes that stay taken beside them."""
        return sum(part.run_largest() for part in self._runner.parts)

    def run_largest_recorded_parts(self) -> None:
        """Do what parts record besides steps, at most."""
        for part in self._runner.parts:
            part.run_largest_recorded()

    def _run_parts(self, num_tokens: int) -> None:
        for part in self._runner.parts:
            part.run_scratch(num_tokens)

    def _alone(self, num_tokens: int, *, context: int = 0) -> None:
        self.run([num_tokens], [self._config.max_num_seqs], context=context)

    def _long_prompt(self) -> int:
        return min(512, self._budget, self._max_model_len)

    def run(
        self, row_lengths: Sequence[int], use_slots: Sequence[int], *, context: int = 0
    ) -> None:
        """Run a forward pass over the null block, and sampling: plain, and with every costly stage.

        row_lengths: tokens of each row; use_slots: their slots, only the scratch slot
        (max_num_seqs) once requests may be present. context: tokens before the last row's, up to
        max_model_len; other rows begin theirs.
        """
        runner = self._runner
        slots = list(use_slots)
        num_rows = len(slots)
        counts = np.minimum(np.asarray(row_lengths, dtype=np.int32), self._max_model_len)
        host_slots = np.asarray(slots, dtype=np.int32)
        first_positions = np.zeros_like(host_slots)
        first_positions[-1] = min(context, self._max_model_len - counts[-1])
        rows = StepRows.of(host_slots, first_positions, counts, host_slots)
        # All lengths are 0 again, whatever an earlier such step has left.
        writes = runner.batch.table.emptied(slots)
        inputs = runner.batch.lay_out(rows, LogitRows.sampled(rows, [True] * num_rows), writes)
        layout = inputs.layout
        # During precompilation no kernel has filled them, and torch would dereference the values.
        for places in (inputs.input_ids, *(p for each in inputs.layouts for p in each.places)):
            places.zero_()
        device = self._device
        origins = (rows.query_start[:-1] - first_positions).repeat(counts)
        positions = np.arange(layout.num_tokens, dtype=np.int64) - origins
        inputs.positions.copy_(torch.from_numpy(positions))
        layout.seq_lens.copy_(torch.from_numpy(rows.seq_lens))
        inputs.sample_slots.copy_(torch.from_numpy(host_slots))
        assert layout.slots is not None, "the batch lays out slots"
        layout.slots.copy_(torch.from_numpy(host_slots))
        inputs.sample_lengths.fill_(1)
        index = torch.arange(num_rows, device=device)
        if isinstance(runner, PoolingRunner):
            runner.pool_all(runner.forward(inputs))
            return
        if not runner.samples:
            runner.forward(inputs)
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
                    params=params,
                    seed=0,
                )
            )
        runner.sampling.upload()
        sample_slots, lengths = inputs.sample_slots, inputs.sample_lengths
        if runner.batch.num_drafts:
            # As many positions as may be sampled of these rows.
            num_logits = min(layout.num_tokens, num_rows * (1 + runner.batch.num_drafts))
            index = torch.arange(num_logits, device=device)
            sample_slots, lengths = sample_slots[index % num_rows], lengths[index % num_rows]
            slots, num_rows = [slots[row % num_rows] for row in range(num_logits)], num_logits
        hidden = take(runner.forward(inputs), index)
        logit_places = LogitPlaces(sample_slots, lengths, slots)
        logits = runner.logits(hidden, places=logit_places)
        words = -(-runner.vocab_size // 32)
        mask = TokenMask(
            torch.full((num_rows, words), -1, dtype=torch.int32, device=device), index, index
        )
        sampler = runner.sampler
        out = sample_outputs(num_rows, device)
        if not sampler.sample_step(logits, sample_slots, lengths, out, mask):
            sampler.in_torch.sample(logits, sample_slots, slots, lengths)
            for table in (logits, logits.float()):
                sampler.mask(table, mask)
                sampler.mask(table, replace(mask, rows=None))
        sampler.sample_plain(logits, sample_slots, lengths, out)
        if sampler.shard is not None:
            own = runner.logits(hidden, Ending.PLAIN, logit_places)
            sampler.shard.sample_plain(own, sample_slots, lengths, out)
        sampler.precompile_processed(logits, sample_slots, lengths, out)
        for slot in slots:
            runner.sampling.release(slot)
        runner.sampling.upload()


def what_decides_kernels(config: EngineConfig, model_config: ModelConfig) -> str:
    """Return what decides which kernels steps launch, besides sources and the device: a
    checkpoint's config.json where it has one, not where it lies."""
    file = model_config.path / "config.json"
    checkpoint = file.read_text() if file.is_file() else str(model_config.path)
    options = msgspec.structs.replace(config, model="")
    return f"{model_config.architecture} {options} {checkpoint}"
