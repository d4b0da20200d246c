"""Per-slot sampling state: what is uploaded, counted, reused, and asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from jackfield.core.sampling_params import SamplingParams
from jackfield.core.step import SlotStart
from jackfield.core.worker.packing import PackedUpload
from jackfield.core.worker.sampling import sampling_state as state_module
from jackfield.core.worker.sampling import step_stages
from jackfield.core.worker.sampling.sampler import Sampler
from jackfield.core.worker.sampling.sampling_columns import NUM_COLUMNS
from jackfield.core.worker.sampling.sampling_state import SamplingState

CPU = torch.device("cpu")


def make_state(slots: int = 8, vocab_size: int = 20) -> SamplingState:
    return SamplingState(slots, vocab_size, CPU, torch.zeros((slots, 32), dtype=torch.int32))


def slot_start(
    slot: int, token_ids: tuple[int, ...] = (1, 2), num_prompt_tokens: int = 2, **params: Any
) -> SlotStart:
    return SlotStart(
        slot=slot,
        request_id=str(slot),
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=0,
        params=SamplingParams(**params),
        seed=slot,
        stop_token_ids=(7,),
    )


def test_packed_upload_returns_every_array_as_it_was() -> None:
    arrays = [
        np.arange(5, dtype=np.int64),
        np.zeros((0, 3), dtype=np.float32),
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array([[-1], [7]], dtype=np.int32),
        np.arange(10, dtype=np.int64)[::2],
    ]
    pack = PackedUpload(CPU)
    assert [pack.add(array) for array in arrays] == [0, 1, 2, 3, 4]
    tensors = pack.send()
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tuple(tensor.shape) == array.shape
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
    arrays[0][:] = -5
    assert tensors[0].tolist() == [0, 1, 2, 3, 4]


def test_two_uploads_in_flight_share_no_memory() -> None:
    tensors = []
    for value in (1, 2):
        pack = PackedUpload(CPU)
        pack.add(np.full(4, value, dtype=np.int64))
        tensors.append(pack.send()[0])
    assert [t.tolist() for t in tensors] == [[1] * 4, [2] * 4]


def test_bias_rows_exist_only_once_somebody_needs_them() -> None:
    state = make_state()
    state.start(slot_start(0))
    state.upload()
    assert state.bias.shape[0] == 0
    state.start(slot_start(1, logit_bias={3: 1.0}))
    state.upload()
    assert state.bias.shape[0] > 0


def test_tables_grow_without_losing_rows_and_reuse_them_clean() -> None:
    state = make_state(slots=9)
    for slot in range(8):
        state.start(
            slot_start(slot, (slot, 9, 9), 1, frequency_penalty=1.0, logit_bias={slot: float(slot)})
        )
        state.upload()
    bias = state.plan(list(range(8))).bias
    assert bias is not None
    for slot in range(8):
        counts = torch.zeros(20, dtype=torch.int16)
        counts[9] = 2
        counts[slot] |= -32768
        assert torch.equal(state.counts[slot], counts)
        expected = torch.zeros(20)
        expected[slot] = slot
        assert torch.equal(state.bias[bias.table[slot]], expected)
    state.release(5)
    state.start(slot_start(5, (3, 3, 3), 1, presence_penalty=1.0, allowed_token_ids=(4,)))
    state.upload()
    stages = state.plan([5])
    assert stages.penalties is not None and stages.bias is not None
    bias_row = int(stages.bias.table[0])
    assert state.counts[5].nonzero().flatten().tolist() == [3]
    assert int(state.counts[5, 3]) == 2 - 32768
    assert state.bias[bias_row].isfinite().nonzero().flatten().tolist() == [4]
    assert state.bias.shape[0] == 8


def test_sampled_tokens_are_counted_for_penalised_slots_alone() -> None:
    state = make_state()
    state.start(slot_start(0, presence_penalty=0.5, temperature=0.0))
    state.start(slot_start(1, temperature=0.0))
    state.start(slot_start(2, repetition_penalty=1.5, temperature=0.0))
    state.upload()
    sampler = Sampler(state)
    logits = torch.zeros(3, 20)
    logits[0, 2] = logits[1, 12] = logits[2, 13] = 9.0
    state.counts[0, 13] = 32766
    for length in (2, 3):
        lengths = torch.full((3,), length)
        sampler.in_torch.sample(logits, torch.tensor([2, 1, 0]), [2, 1, 0], lengths)
    assert {i: int(n) for i, n in enumerate(state.counts[2]) if n} == {1: -32768, 2: 2 - 32768}
    assert int(state.counts[0, 13]) == 32767, "it stays there"
    assert not state.counts[1].any()


def test_only_dirty_rows_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[list[tuple[int, ...]]] = []

    class Recording(PackedUpload):
        def send(self) -> list[torch.Tensor]:
            tensors = super().send()
            shapes.append([tuple(t.shape) for t in tensors])
            return tensors

    for module in (state_module, step_stages):
        monkeypatch.setattr(module, "PackedUpload", Recording)
    state = make_state()
    state.start(slot_start(0))
    state.start(slot_start(3))
    state.upload()
    state.upload()
    state.start(slot_start(4))
    state.release(4)
    state.upload()
    assert shapes == [[(2,), (2, NUM_COLUMNS)]]
    state.plan([0, 3])
    state.plan([0, 3])
    assert shapes[1:] == [[]]


@pytest.mark.parametrize(
    ("params", "needed"),
    [
        (dict(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5), {"plain", "all_greedy"}),
        (dict(), {"plain"}),
        (dict(min_p=0.1), {"plain", "any_min_p"}),
        (dict(top_k=3), {"top_k", "max_top_k"}),
        (dict(top_k=3, top_p=0.5, min_p=0.1), {"top_k", "max_top_k"}),
        (dict(top_k=20), {"plain"}),
        (dict(top_p=0.5), {"sort"}),
        (dict(logit_bias={1: 1.0}), {"plain", "bias"}),
        (dict(allowed_token_ids=(1,)), {"plain", "bias"}),
        (dict(min_tokens=2), {"plain", "min_tokens"}),
        (dict(presence_penalty=1.0), {"plain", "penalties"}),
        (dict(logprobs=4), {"plain", "logprobs", "max_logprobs"}),
        (dict(logprobs=0), {"plain", "logprobs"}),
    ],
)
def test_a_plan_asks_for_what_its_rows_need_and_nothing_else(
    params: dict[str, Any], needed: set[str]
) -> None:
    state = make_state()
    state.start(slot_start(0, **params))
    state.start(slot_start(1))
    state.upload()
    stages = state.plan([0])
    names = set(type(stages).__dataclass_fields__) - {"num_rows"}
    assert {name for name in names if getattr(stages, name)} == needed
    assert stages.graph_safe == (needed <= {"plain", "all_greedy", "any_min_p"})
    assert not state.plan([0, 1]).all_greedy


def test_a_plan_names_the_rows_of_each_stage() -> None:
    state = make_state()
    state.start(slot_start(0, top_k=5))
    state.start(slot_start(1, top_k=9, logprobs=3))
    state.start(slot_start(2, top_p=0.4))
    state.start(slot_start(3))
    state.upload()
    stages = state.plan([3, 1, 2, 0])
    for rows, expected in (
        (stages.plain, [0]),
        (stages.top_k, [1, 3]),
        (stages.sort, [2]),
        (stages.logprobs, [1]),
    ):
        assert rows is not None and rows.batch is not None
        assert rows.batch.tolist() == expected
    assert stages.max_top_k == 9
    assert stages.max_logprobs == 3


def test_a_slot_that_changes_hands_is_planned_anew() -> None:
    state = make_state()
    state.start(slot_start(0, top_p=0.5))
    state.upload()
    assert state.plan([0]).sort is not None
    state.release(0)
    state.start(slot_start(0))
    state.upload()
    assert state.plan([0]).sort is None
    assert state.plan([0]).graph_safe
