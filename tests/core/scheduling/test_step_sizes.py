"""How long steps are by the device's pace, and when decode rows wait for prompts.

The device here computes a prompt token in a second, and the target is 100 seconds.
"""

from __future__ import annotations

import pytest
from scheduled import make_scheduler

from jackfield.core.request import Request
from jackfield.core.sampling_params import OutputKind, SamplingParams
from jackfield.core.scheduling.pacing.plan_timing import StepPace
from jackfield.core.scheduling.pacing.step_sizes import (
    HOPELESS,
    LATE_SHARE,
    LONGEST_BURST,
    LONGEST_PAUSE,
    PAUSE_SHARE,
    QUEUE_SHARE,
    TOKENS_PER_DECODE_ROW,
)
from jackfield.core.step import StepPlan, StepResult
from jackfield.plugins.policies.builtin import FirstComeFirstServed

TARGET = 100.0
SHORT = 40
"""Tokens of a short step."""


class Device:
    """Plans steps, which take a second for each token, one after another."""

    def __init__(self, *, num_decodes: int = 1, target: float = TARGET, **options) -> None:
        self.scheduler = make_scheduler(
            **{
                "max_num_seqs": 64,
                "max_num_batched_tokens": 640,
                "max_model_len": 2048,
                "num_blocks": 1000,
                "block_size": 16,
                "enable_prefix_caching": True,
                "enable_chunked_prefill": True,
                "policy": FirstComeFirstServed(),
                "ttft_target": target,
                **options,
            }
        )
        self.now = 0.0
        self._num_requests = 0
        if num_decodes:
            for _ in range(num_decodes):
                self.arrive(3)
            self.step()

    def arrive(
        self,
        prompt_len: int,
        *,
        waited: float = 0.0,
        prompt: list[int] | None = None,
        max_tokens: int = 1000,
        output_kind: OutputKind = OutputKind.CUMULATIVE,
    ) -> None:
        """Add a request that came `waited` seconds ago."""
        self._num_requests += 1
        self.scheduler.add_requests(
            Request(
                request_id=str(self._num_requests),
                prompt_token_ids=prompt or [1000 + self._num_requests] * prompt_len,
                params=SamplingParams(max_tokens=max_tokens, output_kind=output_kind),
                max_tokens=max_tokens,
                seed=0,
                arrival=self.now - waited,
            )
        )

    def plan(self, short_step: int | None = SHORT) -> StepPlan | None:
        pace = None if short_step is None else StepPace(self.now, 1.0, short_step)
        return self.scheduler.schedule(pace)

    def step(self, short_step: int | None = SHORT) -> list[int]:
        """Run a step; return its rows' numbers of tokens."""
        plan = self.plan(short_step)
        assert plan is not None
        self.now += plan.total_tokens
        counts = [int(sampled) for sampled in plan.samples]
        self.scheduler.update(plan, StepResult(plan.step, counts, [50] * sum(counts)))
        return list(plan.num_tokens)

    def step_of_one_late_prompt(self) -> list[int]:
        """Run a step with a prompt of 20 tokens that is late. Its request leaves after it."""
        self.arrive(20, waited=LATE_SHARE * TARGET)
        rows = self.step()
        self.scheduler.finish_request(str(self._num_requests), "abort")
        return rows


def test_steps_are_short_while_a_request_decodes_and_few_tokens_wait() -> None:
    device = Device(num_decodes=0, target=0.0)
    for _ in range(2):
        device.arrive(60)
    assert device.step() == [60, 60], "no request decodes yet"
    device.arrive(100)
    assert device.step() == [1, 1, 38]
    for _ in range(3):
        device.arrive(55)
    assert device.step() == [1, 1, 62, 55, 55, 55], "more than four short steps wait"


@pytest.mark.parametrize(
    ("prompt_len", "rows"), [(SHORT, [1, 10]), (SHORT + 1, [1, 10, 29])], ids=["whole", "in parts"]
)
def test_a_prompt_that_fits_in_a_short_step_is_not_split_behind_another(
    prompt_len: int, rows: list[int]
) -> None:
    device = Device()
    device.arrive(10)
    device.arrive(prompt_len)
    assert device.step() == rows


def test_a_short_step_has_room_for_prompts_beside_many_decodes() -> None:
    device = Device(num_decodes=40, target=0.0)
    device.arrive(50)
    assert device.step() == [1] * 40 + [20]


def test_without_chunked_prefill_steps_are_not_shortened() -> None:
    device = Device(enable_chunked_prefill=False)
    device.arrive(150, waited=TARGET)
    assert device.step() == [1, 150]


def test_decode_rows_stay_beside_prompts_that_are_in_time() -> None:
    device = Device()
    device.arrive(30)
    assert device.step() == [1, 30]


def test_decode_rows_wait_while_a_first_token_would_be_late() -> None:
    """The second prompt would come after 0.95 of the target, once the first is computed."""
    device = Device()
    device.arrive(20, waited=95.0 - 50.0)
    device.arrive(30, waited=95.0 - 50.0)
    assert device.step() == [20], "the second is not begun: its first token would come no earlier"
    assert device.step() == [30]
    assert device.step() == [1, 1, 1]


def test_decode_rows_wait_one_step_for_a_prompt_that_queues() -> None:
    device = Device()
    for _ in range(2):
        device.arrive(20, waited=QUEUE_SHARE * TARGET - 19.0)
    assert device.step() == [20]
    assert device.step() == [1, 1, 20], "it is still in time"


def test_a_prompt_that_is_too_late_anyway_makes_no_decode_row_wait() -> None:
    device = Device()
    device.arrive(30, waited=HOPELESS * TARGET)
    assert device.step() == [1, 30]
    device.arrive(int(TARGET) + 1, waited=LATE_SHARE * TARGET)
    assert device.step()[:2] == [1, 1], "computing it alone takes longer than the target"


def test_decode_rows_wait_for_a_bounded_time() -> None:
    device = Device()
    rows = [device.step_of_one_late_prompt() for _ in range(8)]
    assert rows == [[20]] * int(LONGEST_PAUSE * TARGET // 20) + [[1, 20]]


def test_decode_rows_wait_for_a_bounded_share_of_the_time() -> None:
    device = Device()
    rows = [device.step_of_one_late_prompt() for _ in range(600)]
    alone = 20 * rows.count([20])
    others = 21 * rows.count([1, 20])
    assert 20 * len(rows) <= alone + others
    share = PAUSE_SHARE * (alone + others)
    assert share < alone <= share + LONGEST_BURST * TARGET


def test_many_decode_rows_wait_for_no_prompt() -> None:
    for num_decodes, alone in ((20 // TOKENS_PER_DECODE_ROW, True), (4, False)):
        device = Device(num_decodes=num_decodes)
        device.arrive(20, waited=LATE_SHARE * TARGET)
        assert (device.step() == [20]) is alone


def test_decode_rows_wait_for_no_prompt_that_is_cached() -> None:
    """Of 89 tokens, nine are to be computed: less than a quarter of a short step."""
    device = Device(num_decodes=0)
    prompt = list(range(81))
    device.arrive(81, prompt=prompt)
    device.step()
    device.arrive(89, prompt=prompt[:80] + [7] * 9, waited=LATE_SHARE * TARGET)
    assert device.step() == [1, 9]


def test_a_prompt_is_not_split_beside_another_one() -> None:
    device = Device(target=2 * TARGET)
    for _ in range(2):
        device.arrive(25)
    assert device.step() == [1, 25], "14 more tokens would fit"
    assert device.step() == [1, 1, 25]
    device.arrive(15)
    device.arrive(SHORT + 1)
    assert device.step() == [1, 1, 1, 15, 22], "it takes two steps in any case"


def test_a_step_alone_has_prompts_of_half_a_short_step_or_a_long_one() -> None:
    for prompts, alone in (((8, 9, 4), [8, 9]), ((9, 30), [9, 30]), ((50, 5), [40])):
        device = Device()
        for prompt_len in prompts:
            device.arrive(prompt_len, waited=LATE_SHARE * TARGET)
        assert device.step() == alone


def test_decode_rows_go_on_where_no_prompt_finds_blocks() -> None:
    device = Device(num_decodes=0, num_blocks=9)
    device.arrive(3, max_tokens=40)
    device.arrive(80, max_tokens=40)
    assert device.step() == [3, 80]
    device.arrive(60, waited=LATE_SHARE * TARGET, max_tokens=1)
    assert device.step() == [1, 1], "two of eight blocks are free, and it needs four"


@pytest.mark.parametrize("option", [{"num_drafts": 2}, {"num_stages": 2}, {"target": 0.0}])
def test_decode_rows_never_wait_with(option: dict[str, float]) -> None:
    """With two stages, a row is in every second step."""
    device = Device(**option)
    rows = [device.step_of_one_late_prompt() for _ in range(4)]
    assert rows.count([1, 20]) == 4 // int(option.get("num_stages", 1))


def sizes_beside(kind: OutputKind, itl_target: float, waiting: int = 40) -> int:
    """Tokens of a step with many prompts waiting, beside a decoding request of this kind."""
    device = Device(num_decodes=0, itl_target=itl_target, max_num_batched_tokens=8192)
    device.arrive(3, output_kind=kind)
    device.step()
    for _ in range(waiting):
        device.arrive(600)
    plan = device.scheduler.schedule(StepPace(device.now, 1.0, 512))
    assert plan is not None
    return plan.total_tokens


@pytest.mark.parametrize("kind", [OutputKind.DELTA, OutputKind.CUMULATIVE])
def test_steps_beside_streams_are_as_long_as_their_next_tokens_may_take(kind: OutputKind) -> None:
    assert sizes_beside(kind, 0.0) > 8000
    assert sizes_beside(kind, 2000.0) == 1920, "whole units of 128 tokens"
    assert sizes_beside(kind, 1.0) == 512, "at least one"
    assert sizes_beside(kind, 1e6) > 8000


def test_steps_beside_requests_that_nobody_reads_yet_are_not_shortened() -> None:
    assert sizes_beside(OutputKind.FINAL_ONLY, 2000.0) > 8000


def test_a_pause_ends_in_time_for_the_next_token_of_a_stream() -> None:
    device = Device(itl_target=0.75 * TARGET)
    rows = [device.step_of_one_late_prompt() for _ in range(5)]
    assert rows == [[20]] * 3 + [[1, 20], [20]]


def test_a_pace_that_is_not_known_leaves_steps_long() -> None:
    device = Device()
    device.arrive(500, waited=LATE_SHARE * TARGET)
    assert device.step(None) == [1, 500]
