"""A scheduler, requests for it, and the worker's part of a step, for tests of what it decides."""

from __future__ import annotations

from jackfield.core.request import Request, Update
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import StepPlan, StepResult
from jackfield.plugins.policies.builtin import FirstComeFirstServed

EOS = 2
_numbers = iter(range(10**9))


def make_scheduler(**changes) -> Scheduler:
    options = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "max_model_len": 2048,
        "num_blocks": 1000,
        "block_size": 16,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "policy": FirstComeFirstServed(),
    }
    return Scheduler(**{**options, **changes})


def make_request(prompt_len: int = 10, *, max_tokens: int = 16, token: int | None = None, **more):
    """A prompt of one repeated token, by default one that no other request has."""
    number = next(_numbers)
    params = more.pop("params", None) or SamplingParams(max_tokens=max_tokens)
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=more.pop("prompt", None) or [token or 1000 + number] * prompt_len,
        params=params,
        max_tokens=params.max_tokens or max_tokens,
        seed=0,
        eos_token_ids=frozenset(() if params.ignore_eos else {EOS}),
        arrival=more.pop("arrival", float(number)),
        **more,
    )


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add_requests(request)


def run(scheduler: Scheduler, plan: StepPlan, token: int = 50, **result) -> list[Update]:
    """The worker's part: every sampling row gets the same token."""
    counts = [int(sampled) for sampled in plan.samples]
    return scheduler.update(plan, StepResult(plan.step, counts, [token] * sum(counts), **result))


def drain(scheduler: Scheduler, token: int = 50) -> None:
    while (plan := scheduler.schedule()) is not None:
        run(scheduler, plan, token)
