"""Launches a step per plan, for models that return vectors.

Chunked prompts keep partial sums, or states for a vector per token, by slot. Launch thread only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..loading.pooling_config import PoolingConfig
from ..loading.projection import Projections
from ..nn.context import ForwardContext
from ..pooling_params import TOKEN_TASKS, PooledRow, PoolingParams
from ..protocols.attention import PagedBackend
from ..step import NOTHING_IN_PROCESS, InProcess, SlotStart, StepPlan, StepResult
from .batch import LogitPlaces, PersistentBatch, StepInputs, releasing_all
from .launched_step import EmptyStep, Reports, reported
from .parts.part import WorkerPart
from .parts.part_set import WorkerParts
from .per_slot import PerSlot, update_slots


@dataclass
class LaunchedPooling:
    """A step in flight; `wait` returns its StepResult."""

    plan: StepPlan
    outputs: dict[int, torch.Tensor]
    """Row → float32 on the host, after `event`."""
    event: Any
    launched: float
    keep: list[Any] = field(default_factory=list)
    """Device tensors that the copies read; held until they are done."""
    failed: dict[int, str] = field(default_factory=dict)
    """Row → why it failed while it was launched."""
    reports: Reports = field(default_factory=dict)

    def wait(self) -> StepResult:
        if self.event is not None:
            self.event.synchronize()
        self.keep.clear()
        pooled: dict[int, PooledRow] = {}
        failed = dict(self.failed)
        for row, output in self.outputs.items():
            values = output.numpy()
            if np.isfinite(values).all():
                pooled[row] = PooledRow(tuple(values.shape), values.tobytes())
            else:
                failed[row] = "the result is not a number (NaN or infinite hidden states)"
        return StepResult(
            step=self.plan.step,
            counts=[0] * len(self.plan.slots),
            token_ids=[],
            pooled=pooled,
            failed=failed,
            device_seconds=time.monotonic() - self.launched,
            parts=reported(self.reports),
        )


class PoolingRunner(PerSlot):
    def __init__(
        self,
        *,
        model: nn.Module,
        pooling: PoolingConfig,
        backend: PagedBackend | None,
        batch: PersistentBatch,
        device: torch.device,
        parts: Sequence[WorkerPart] = (),
    ) -> None:
        """parts: in the order in which they are called."""
        self.parts = WorkerParts(parts)
        self.model = model
        self.pooling = pooling
        self.backend = backend
        self.batch = batch
        self.device = device
        self.projections = Projections(pooling.projections, device)
        self._starts: dict[int, SlotStart] = {}
        self._kept: dict[int, torch.Tensor] = {}
        """Slot → earlier chunks' sum [hidden_size] float32, or first state."""
        self._chunks: dict[int, list[torch.Tensor]] = {}
        """Slot → earlier chunks' states or logits [tokens, any], for a result per token."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan, in_process: InProcess = NOTHING_IN_PROCESS) -> LaunchedPooling:
        """Queue a step, without waiting."""
        launched = time.monotonic()
        self.update_slots(plan)
        self.parts.before(plan)
        inputs = self.batch.apply(plan)
        hidden = self.forward(inputs, self._token_types(plan))
        step = self._copy_back(plan, self._results(plan, inputs, hidden), launched)
        # It has what parts of pooled states read of a step.
        self.parts.after(plan, step)  # type: ignore[arg-type]
        return step

    def forward(
        self, inputs: StepInputs, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """→ hidden states [num_tokens, hidden_size]"""
        context = ForwardContext.of(
            self.backend, inputs.layouts, inputs.positions, token_type_ids,
            parts=self.parts.context(inputs),
        )  # fmt: skip
        hidden: torch.Tensor = self.model(inputs.input_ids, context)
        return hidden

    def pool_all(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the costliest pooling on a step's states, to measure its memory."""
        states = self._states(hidden).float()
        if self.pooling.task == "classify":
            self._classified(states[:1])
        elif self.pooling.classifies_tokens:
            self._classified(states)
        return states

    @torch.inference_mode()
    def write(self, plan: StepPlan, in_process: InProcess) -> EmptyStep:
        self.update_slots(plan, in_process)
        self.parts.before(plan)
        self.batch.write(plan)
        return EmptyStep(plan, self.parts.poll())

    def update_slots(self, plan: StepPlan, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        """Update what is remembered of the slots that the plan releases and starts."""
        update_slots((self, *self.parts.per_slot), plan, in_process)

    def forget_slots(self) -> None:
        """Reset all slots between steps."""
        self.update_slots(releasing_all(self.batch.num_slots))

    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        self.release(start.slot)
        self._starts[start.slot] = start

    def release(self, slot: int) -> None:
        for table in (self._starts, self._kept, self._chunks):
            table.pop(slot, None)  # type: ignore[attr-defined]

    def _token_types(self, plan: StepPlan) -> torch.Tensor | None:
        """[num_tokens], for encoders with whole prompts; None: all 0."""
        starts = [self._starts[slot] for slot in plan.slots]
        if self.pooling.causal or not any(start.token_type_ids for start in starts):
            return None
        types = np.concatenate(
            [
                np.asarray(start.token_type_ids or (0,) * len(start.token_ids), dtype=np.int32)
                for start in starts
            ]
        )
        return torch.from_numpy(types).to(self.device, non_blocking=True).long()

    # ------------------------------------------------------------ pooling

    def _results(
        self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """Row → float32 result on the device, of finished prompts."""
        each_token = [
            row for row, slot in enumerate(plan.slots) if self._params(slot).task in TOKEN_TASKS
        ]
        whole = [row for row in range(len(plan.slots)) if row not in set(each_token)]
        results: dict[int, torch.Tensor] = {}
        starts = inputs.layout.query_start_cpu
        for row in each_token:
            slot = plan.slots[row]
            states = self._states(hidden[int(starts[row]) : int(starts[row + 1])])
            if self._params(slot).task == "token_classify":  # Logits take less room than states.
                states = self.model.classify(states)  # type: ignore[operator]
            self._chunks.setdefault(slot, []).append(states)
            if plan.samples[row]:
                joined = torch.cat(self._chunks.pop(slot))
                results[row] = self._of_steps(self._of_tokens(joined, self._params(slot)), slot)
        if whole:
            pooled = self._pooled(plan, inputs, hidden, whole)
            finished = [number for number, row in enumerate(whole) if plan.samples[row]]
            if finished:
                rows = [whole[number] for number in finished]
                params = [self._params(plan.slots[row]) for row in rows]
                if len(finished) < len(whole):
                    pooled = pooled[torch.tensor(finished, device=self.device)]
                self._note_rows([plan.slots[row] for row in rows])
                results |= dict(zip(rows, self._finished(pooled, params), strict=True))
        return results

    def _of_tokens(self, states: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """States or logits, [num_tokens, any] → a float32 result for each token."""
        if params.task == "token_embed":
            vectors = getattr(self.model, "token_vectors", None)
            return _embedding((states if vectors is None else vectors(states)).float(), params)
        logits = states.float()
        if self.pooling.returned_labels is not None:
            logits = logits[:, list(self.pooling.returned_labels)]
        return self._activated(logits) if params.activation else logits

    def _of_steps(self, results: torch.Tensor, slot: int) -> torch.Tensor:
        """[num_tokens, any] → those that the model shows, or at the token that ends a step."""
        start, task = self._starts[slot], self._params(slot).task
        if (step := self.pooling.step_token_id) is None:
            shown = getattr(self.model, "result_tokens", None)
            return results if shown is None else results[shown(task, start.token_ids)]
        token_ids = torch.tensor(start.token_ids)
        return results[(token_ids == step).nonzero().flatten().to(results.device)]

    def _activated(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.sigmoid() if self.pooling.activation == "sigmoid" else logits.softmax(-1)

    def _note_rows(self, slots: list[int]) -> None:
        """Let parts know whose pooled states a classifier gets."""
        lengths = [len(self._starts[slot].token_ids) for slot in slots]
        device = [torch.tensor(each).to(self.device, non_blocking=True)
                  for each in (slots, lengths)]  # fmt: skip
        self.parts.logit_rows(LogitPlaces(device[0], device[1], slots))

    def _pooled(
        self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor, rows: list[int]
    ) -> torch.Tensor:
        """→ [len(rows), hidden_size] float32, valid for prompts that end in this step."""
        starts = inputs.layout.query_start_cpu
        kind = self.pooling.pooling_type
        if kind == "LAST":
            last = torch.from_numpy(starts[1:][rows].astype(np.int64) - 1)
            return self._states(hidden[last.to(self.device, non_blocking=True)]).float()
        if kind == "CLS":
            first = torch.from_numpy(starts[:-1][rows].astype(np.int64))
            pooled = self._states(hidden[first.to(self.device, non_blocking=True)]).float()
        else:
            pooled = self._sums(inputs, hidden, rows)
        if not self.pooling.causal:
            return pooled if kind == "CLS" else pooled / self._lengths(plan, rows)
        parts = []
        for number, row in enumerate(rows):
            slot, value = plan.slots[row], pooled[number]
            earlier = self._kept.pop(slot, None)
            if earlier is not None:
                value = earlier if kind == "CLS" else earlier + value
            if not plan.samples[row]:
                self._kept[slot] = value
            parts.append(value)
        pooled = torch.stack(parts)
        return pooled if kind == "CLS" else pooled / self._lengths(plan, rows)

    def _sums(self, inputs: StepInputs, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """[len(rows), hidden_size] float32: over this step's tokens."""
        layout = inputs.layout
        states = self._states(hidden).float()
        row_of_token = torch.repeat_interleave(
            torch.arange(layout.num_rows, device=self.device),
            torch.diff(layout.query_start).long(),
            output_size=layout.num_tokens,
        )
        sums = torch.zeros(layout.num_rows, states.shape[-1], device=self.device)
        sums.index_add_(0, row_of_token, states)
        return (
            sums if len(rows) == layout.num_rows else sums[torch.tensor(rows, device=self.device)]
        )

    def _lengths(self, plan: StepPlan, rows: list[int]) -> torch.Tensor:
        lengths = [[float(len(self._starts[plan.slots[row]].token_ids))] for row in rows]
        return torch.tensor(lengths).to(self.device, non_blocking=True)

    def _finished(self, pooled: torch.Tensor, params: list[PoolingParams]) -> list[torch.Tensor]:
        """pooled: [num_rows, hidden_size] → float32 results."""
        if self.pooling.task == "embed":
            pooled = self.projections(pooled)
            if all(row_params == params[0] for row_params in params):
                return list(_embedding(pooled, params[0]))
            return [
                _embedding(row, row_params) for row, row_params in zip(pooled, params, strict=True)
            ]
        logits = self._classified(pooled)
        active = self._activated(logits)
        return [
            active[row] if row_params.activation else logits[row]
            for row, row_params in enumerate(params)
        ]

    def _classified(self, pooled: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] → logits [num_rows, num_labels] float32"""
        dtype = next(self.model.parameters()).dtype
        return self.model.classify(pooled.to(dtype)).float()  # type: ignore[operator, no-any-return]

    def _states(self, hidden: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.model.pooling_states(hidden)  # type: ignore[operator]
        return states

    def _params(self, slot: int) -> PoolingParams:
        params = self._starts[slot].pooling
        assert params is not None, "an engine that pools takes pooling requests alone"
        return params

    def _copy_back(
        self, plan: StepPlan, results: dict[int, torch.Tensor], launched: float
    ) -> LaunchedPooling:
        """Start asynchronous copies to the host."""
        references: list[Any] = [results]
        event = None
        if self.device.type == "cuda" and results:
            flat = torch.cat([result.reshape(-1) for result in results.values()])
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            host.copy_(flat, non_blocking=True)
            references.append(flat)
            pieces = host.split([result.numel() for result in results.values()])
            results = {
                row: piece.view(result.shape)
                for (row, result), piece in zip(results.items(), pieces, strict=True)
            }
            event = torch.cuda.Event()
            event.record()
        return LaunchedPooling(plan, results, event, launched, references)


def _embedding(vectors: torch.Tensor, params: PoolingParams) -> torch.Tensor:
    """[..., hidden_size] → [..., dimensions], normalised if requested."""
    if params.dimensions is not None:
        vectors = vectors[..., : params.dimensions]
    return F.normalize(vectors, dim=-1) if params.normalize else vectors
