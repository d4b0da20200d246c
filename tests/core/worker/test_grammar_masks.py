"""Masks of many rows: slow ones are shared among threads, and each row is its own all the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from jackfield import SamplingParams
from jackfield.core.grammars.batch_masks import advance_all
from jackfield.core.grammars.constraint import _end_token_bits, mask_ends
from jackfield.core.step import CompiledGrammar, GrammarStart, InProcess, SlotStart
from jackfield.core.worker.sampling import masks as masks_module
from jackfield.core.worker.sampling.masks import GrammarMasks

VOCABULARY, END = 100, 99


class Panic(BaseException):
    """What a panic of Rust becomes in Python: no `Exception`."""


class Counting:
    """Allows the token that is the number of those before it; `seconds`: what a mask takes of a
    processor, `waits`: of a wall's clock besides; `empty_at`: where it allows none."""

    def __init__(
        self,
        seconds: float = 0.0,
        fails_at: int = -1,
        *,
        waits: float = 0.0,
        empty_at: int = -1,
        panics_at: int = -1,
    ) -> None:
        self.seconds, self.fails_at, self.waits = seconds, fails_at, waits
        self.empty_at, self.panics_at = empty_at, panics_at
        self.taken = 0
        self.threads: set[str] = set()

    def matcher(self) -> Any:
        return self

    def accept(self, token_ids: Sequence[int]) -> bool:
        self.taken += 1
        return token_ids[0] == self.taken - 1

    def fill_bitmask(self, row: np.ndarray) -> None:
        self.threads.add(threading.current_thread().name)
        time.sleep(self.waits)
        end = time.thread_time() + self.seconds
        while self.seconds and time.thread_time() < end:
            pass
        if self.taken == self.panics_at:
            raise Panic("a panic")
        if self.taken == self.fails_at:
            raise RuntimeError("past its limits")
        row[:] = 0
        if self.taken != self.empty_at:
            row[self.taken >> 5] = 1 << (self.taken & 31)


class Step:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def kept_tokens(self) -> list[list[int]]:
        return [[token] for token in self.tokens]

    def proposals(self) -> None:
        return None


def started(
    grammars: Sequence[Counting],
    threads: int,
    masks: GrammarMasks | None = None,
    params: Sequence[SamplingParams] = (),
) -> GrammarMasks:
    masks = masks or GrammarMasks(
        vocab_size=VOCABULARY, device=torch.device("cpu"), mask_timeout=5.0, threads=threads
    )
    for slot, grammar in enumerate(grammars):
        start = GrammarStart((END,))
        masks.start(
            SlotStart(
                slot=slot, request_id=str(slot), token_ids=(1,), num_prompt_tokens=1,
                num_computed_tokens=0, params=params[slot] if params else SamplingParams(), seed=0,
                grammar=start,
            ),
            InProcess({slot: CompiledGrammar(start, grammar, token_bytes=lambda _: b"x")}),
        )  # fmt: skip
    return masks


def step(masks: GrammarMasks, slots: list[int], token: int) -> list[list[int]]:
    """Fill, and sample `token` everywhere → the tokens allowed in each row with a grammar."""
    rows = masks.rows(slots)
    mask = masks.fill(rows, len(slots))
    masks.sampled(Step([token] * len(slots)), rows)
    bits = np.unpackbits(mask.bits.numpy().view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


class Meeting(Counting):
    """Once they are known to be slow, two masks are filled at a time, or none."""

    def __init__(self, meeting: threading.Barrier) -> None:
        super().__init__(seconds=0.002)
        self.meeting = meeting

    def fill_bitmask(self, row: np.ndarray) -> None:
        if self.taken:
            self.meeting.wait()
        super().fill_bitmask(row)


def test_slow_masks_are_shared_among_threads() -> None:
    meeting = threading.Barrier(2, timeout=120)
    grammars = [Meeting(meeting) for _ in range(12)]
    masks = started(grammars, threads=3)
    slots = list(range(12))
    assert step(masks, slots, 0) == [[0]] * 12
    alone = set().union(*(grammar.threads for grammar in grammars))
    assert alone == {threading.current_thread().name}, "nobody knew that they are slow"
    for token in (1, 2):
        assert step(masks, slots, token) == [[token]] * 12
    assert len(set().union(*(grammar.threads for grammar in grammars))) > 1


def test_quick_masks_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_module, "SHARED_SECONDS", 10.0)  # However busy this machine is.
    grammars = [Counting() for _ in range(4)]
    masks = started(grammars, threads=3)
    for token in range(5):
        assert step(masks, [0, 1, 2, 3], token) == [[token]] * 4
    assert set().union(*(grammar.threads for grammar in grammars)) == {
        threading.current_thread().name
    }


def test_a_row_that_fails_on_a_helper_fails_alone() -> None:
    grammars = [Counting(seconds=0.002, fails_at=2 if slot == 5 else -1) for slot in range(8)]
    masks = started(grammars, threads=2)
    slots = list(range(8))
    for token in range(2):
        step(masks, slots, token)
    allowed = step(masks, slots, 2)
    assert allowed[5] == list(range(-(-VOCABULARY // 32) * 32)), "anything, and it ends"
    assert allowed[:5] + allowed[6:] == [[2]] * 7
    assert set(masks.failures(masks.rows(slots))) == {5}


def test_rows_without_a_grammar_are_named() -> None:
    masks = started([Counting()], threads=0)
    rows = masks.rows([7, 0, 9])
    mask = masks.fill(rows, 3)
    assert mask.rows is not None and mask.rows.tolist() == [1]


class Rolling(Counting):
    """One whose tokens can be taken back."""

    def rollback(self, num_tokens: int) -> None:
        self.taken -= num_tokens


ALL = list(range(-(-VOCABULARY // 32) * 32))
"""What a row allows that is never sampled."""


def test_masks_of_drafts_follow_them_and_go_back() -> None:
    grammars = [Rolling(), Rolling(), Rolling(fails_at=2), Counting(), Rolling(empty_at=1)]
    drafts = [[0, 1, 2], [0, 7, 2], [0, 1, 2], [0], [0, 1]]
    masks = started(grammars, threads=0)
    rows = masks.rows([7, 0, 1, 2, 3, 4])
    for (_, constraint), tokens in zip(rows, drafts, strict=True):
        constraint.drafts = tokens
    mask, limits = masks.fill_along(rows, [0, 3, 3, 3, 1, 3])
    bits = np.unpackbits(mask.bits.numpy().view(np.uint8), axis=1, bitorder="little")
    allowed = [np.flatnonzero(row).tolist() for row in bits]
    assert limits.tolist() == [0, 3, 1, 1, 0, 0]
    assert mask.places.tolist() == [-1, *range(len(allowed))]
    assert allowed[:4] == [[0], [1], [2], [3]], "all drafts may follow"
    assert allowed[4:8] == [[0], [1], ALL, ALL], "the second is forbidden"
    assert allowed[8:12] == [[0], [1], ALL, ALL], "its failure would be another's"
    assert allowed[12:14] == [[0], ALL], "it cannot take tokens back"
    assert allowed[14:] == [[0], ALL, ALL, ALL], "a dead end behind a draft"
    assert [grammar.taken for grammar in grammars] == [0] * 5
    assert not masks.failures(rows)
    assert masks.unfollowed([0, 3, 7]) == {3}


class Forcing(Rolling):
    """Says that the next three tokens are forced."""

    def forced_text(self) -> str:
        return "".join(map(str, range(self.taken, self.taken + 3)))


def test_forced_tokens_follow_the_last_draft_that_can_be_accepted() -> None:
    """All but the last of their tokens, which may be longer."""
    masks = started([Forcing(), Forcing(), Rolling(), Forcing()], threads=0)
    masks.seeks_forced = True
    rows = masks.rows([7, 0, 1, 2, 3])
    for (_, constraint), drafts in zip(rows, ([0, 1], [0, 9], [0], []), strict=True):
        constraint.drafts = drafts
        constraint._encode = lambda text: list(map(int, text))
    masks.fill_along(rows, [0, 2, 2, 1, 2])
    assert masks.take_forced() == {1: (2, [2, 3]), 2: (1, [1, 2]), 4: (0, [0, 1])}
    assert not masks.take_forced()
    masks.fill(rows, 5)
    assert masks.take_forced() == {1: (0, [0, 1]), 2: (0, [0, 1]), 4: (0, [0, 1])}


class ForcingSlowly(Forcing):
    asked = 0

    def forced_text(self) -> str:
        self.asked += 1
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return super().forced_text()


def test_slow_forced_text_is_not_asked_for_again() -> None:
    grammar = ForcingSlowly()
    masks = started([grammar], threads=0)
    masks.seeks_forced = True
    rows = masks.rows([0])
    rows[0][1]._encode = lambda text: list(map(int, text))
    for _ in range(3):
        masks.fill(rows, 1)
    assert grammar.asked == 1


def test_parts_of_a_mask_keep_their_rows() -> None:
    masks = started([Rolling(), Rolling()], threads=0)
    rows = masks.rows([0, 7, 1])
    rows[1][1].drafts = [0]
    mask, _ = masks.fill_along(rows, [0, 2, 1])
    part = mask.part(np.array([1, 5, 0]))
    assert part is not None and part.rows is not None
    assert part.rows.tolist() == [1, 2] and part.places.tolist() == [-1, 0, 1]
    assert part.bits.tolist() == mask.bits[[2, 0]].tolist()
    assert mask.part(np.array([1, 2])) is None


class Together(Counting):
    """A backend that fills many rows in one call, some of which it cannot."""

    calls = 0

    @classmethod
    def fill_bitmasks(cls, matchers: Any, bits: np.ndarray, rows: Sequence[int]) -> list[Any]:
        Together.calls += 1
        errors: list[Any] = []
        for matcher, row in zip(matchers, rows, strict=True):
            if matcher.fails_at == -9:
                raise OSError("nothing works")
            try:
                matcher.fill_bitmask(bits[row])
                errors.append(None)
            except RuntimeError as error:
                errors.append(error)
        return errors


@pytest.mark.parametrize("kind", [Counting, Together])
def test_a_row_without_an_allowed_token_fails_by_its_field(kind: Any) -> None:
    masks = started([kind(empty_at=1 if slot == 2 else -1) for slot in range(4)], threads=0)
    slots = [0, 1, 2, 3]
    step(masks, slots, 0)
    assert not masks.failures(masks.rows(slots))
    assert [row for i, row in enumerate(step(masks, slots, 1)) if i != 2] == [[1]] * 3
    failed = [constraint for _, constraint in masks.rows(slots) if constraint.failure]
    assert [constraint.failed_param for constraint in failed] == ["structured_outputs"]
    assert "dead end" in masks.failures(masks.rows(slots))[2]


@pytest.mark.parametrize("kind", [Counting, Together])
def test_lists_that_leave_nothing_of_a_grammar_fail_their_request_alone(kind: Any) -> None:
    params = [SamplingParams(), SamplingParams(allowed_token_ids=(0, 5)), SamplingParams()]
    masks = started([kind() for _ in params], threads=0, params=params)
    assert step(masks, [0, 1, 2], 0) == [[0]] * 3
    rows = step(masks, [0, 1, 2], 1)
    assert rows[0] == rows[2] == [1]
    failures = masks.failures(masks.rows([0, 1, 2]))
    assert set(failures) == {1} and failures[1].startswith("allowed_token_ids: ")


@pytest.mark.parametrize("kind", [Counting, Together])
def test_a_panic_of_a_backend_fails_its_request_alone(kind: Any) -> None:
    masks = started([kind(panics_at=3 if slot == 1 else -1) for slot in range(3)], threads=0)
    for token in range(4):
        rows = step(masks, [0, 1, 2], token)
        assert rows[0] == rows[2] == [token]
    assert masks.failures(masks.rows([0, 1, 2])) == {1: "structured_outputs: a panic"}


def test_one_row_without_a_token_leaves_the_others_in_one_call() -> None:
    masks = started([Each() for _ in range(4)], threads=0)
    step(masks, [0, 1, 2, 3], 0)
    constraints = [constraint for _, constraint in masks.rows([0, 1, 2, 3])]
    Together.calls = 0
    advance_all(constraints, [0, -1, 0, 0])
    assert Together.calls == 1, "one call for the three that go on"
    assert [constraint.failure for constraint in constraints] == [None] * 4
    assert [constraint.ended for constraint in constraints] == [False, True, False, False]
    assert [constraint.matcher.taken for constraint in constraints] == [1, 0, 1, 1]


def test_a_busy_host_does_not_make_a_mask_slow() -> None:
    grammars = [Counting(waits=0.03), Counting(seconds=0.03)]
    masks = GrammarMasks(
        vocab_size=VOCABULARY, device=torch.device("cpu"), mask_timeout=0.02, threads=0
    )
    started(grammars, threads=0, masks=masks)
    step(masks, [0, 1], 0)
    failures = masks.failures(masks.rows([0, 1]))
    assert set(failures) == {1} and "processor time" in failures[1]


def test_a_backend_may_fill_all_rows_in_one_call() -> None:
    grammars = [Together(fails_at=1 if slot == 2 else -1) for slot in range(4)]
    masks = started(grammars, threads=2)
    Together.calls = 0
    assert step(masks, [0, 1, 2, 3], 0) == [[0]] * 4
    assert [row for i, row in enumerate(step(masks, [0, 1, 2, 3], 1)) if i != 2] == [[1]] * 3
    assert Together.calls == 2 and set(masks.failures(masks.rows([0, 1, 2, 3]))) == {2}
    assert [row for i, row in enumerate(step(masks, [3, 2, 1, 0], 2)) if i != 1] == [[2]] * 3


def test_a_step_whose_rows_have_all_ended_does_not_call_the_backend() -> None:
    masks = started([Together(), Together()], threads=0)
    step(masks, [0, 1], -1)
    Together.calls = 0
    step(masks, [0, 1], 0)
    assert Together.calls == 0 and not masks.failures(masks.rows([0, 1]))


class Each(Together):
    """A backend that goes on by a token in many rows in one call."""

    fails = False

    @classmethod
    def accept_each(cls, matchers: Any, token_ids: Sequence[int]) -> list[Any]:
        Together.calls += 1
        if cls.fails:
            raise OSError("nothing works")
        outputs = []
        for matcher, token_id in zip(matchers, token_ids, strict=True):
            output = matcher.accept([token_id])
            outputs.append(RuntimeError("past its limits") if matcher.fails_at == -8 else output)
        return outputs


def test_a_backend_may_take_all_tokens_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = started([Each(fails_at=-8 if slot == 2 else -1) for slot in range(4)], threads=2)
    slots = [0, 1, 2, 3]
    assert step(masks, slots, 0) == [[0]] * 4
    Together.calls = 0
    assert [row for i, row in enumerate(step(masks, slots, 1)) if i != 2] == [[1]] * 3
    assert Together.calls == 2
    assert masks.failures(masks.rows(slots)) == {2: "structured_outputs: past its limits"}
    assert step(masks, [0, 1], -1)[0] == [2]
    assert step(masks, [0, 3, 1], 2)[1] == [2], "the others have ended"
    monkeypatch.setattr(Each, "fails", True)
    masks = started([Each() for _ in range(3)], threads=0)
    step(masks, [0, 1, 2], 0)
    step(masks, [0, 1, 2], 1)
    assert set(masks.failures(masks.rows([0, 1, 2]))) == {0, 1, 2}


def test_ends_are_held_back_in_rows_that_allow_anything_else() -> None:
    ends = _end_token_bits((2, 33, 2))
    assert _end_token_bits((2, 33, 2)) is ends
    bits = np.zeros((4, 3), dtype=np.int32)
    bits[0, 0], bits[1], bits[2] = 0b110, (0b100, 0b11, 0), (0b100, 0, 0)
    bits[3] = -1
    mask_ends(ends, bits, [0, 1, 2])
    assert bits[0].tolist() == [0b010, 0, 0] and bits[1].tolist() == [0, 0b01, 0]
    assert bits[2].tolist() == [0b100, 0, 0], "it can only end"
    assert (bits[3] == -1).all(), "not asked for"


def test_a_call_for_all_that_fails_costs_nobody_anything() -> None:
    grammars = [Together(fails_at=-9 if slot == 1 else -1) for slot in range(3)]
    masks = started(grammars, threads=0)
    for token in range(3):
        assert step(masks, [0, 1, 2], token) == [[token]] * 3


def test_after_a_slow_call_each_row_is_timed() -> None:
    grammars = [Together(seconds=0.03 if slot == 1 else 0.0) for slot in range(3)]
    masks = GrammarMasks(
        vocab_size=VOCABULARY, device=torch.device("cpu"), mask_timeout=0.02, threads=0
    )
    started(grammars, threads=0, masks=masks)
    step(masks, [0, 1, 2], 0)
    assert not masks.failures(masks.rows([0, 1, 2]))
    step(masks, [0, 1, 2], 1)
    assert set(masks.failures(masks.rows([0, 1, 2]))) == {1}


def test_a_slot_whose_grammar_is_missing_beside_the_plan_does_not_run_without_it() -> None:
    masks = started([], threads=0)
    start = SlotStart(
        slot=4, request_id="r", token_ids=(1,), num_prompt_tokens=1, num_computed_tokens=0,
        params=SamplingParams(), seed=0, grammar=GrammarStart((END,)),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="slot 4: its grammar is missing beside the plan"):
        masks.start(start)
