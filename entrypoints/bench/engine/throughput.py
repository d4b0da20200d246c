"""`jackfield bench throughput`: many requests at once, in process (W2, W3, W4, W7)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from ..roofline import Extent, batch_floor, decode_step_floor, prefill_floor, prefill_flops
from ..types import Bench, Record, extents, rounded
from ..workloads import BenchRequest, Kind, Workload, draw
from .latency import cut, rounded_list


def measure_batch(bench: Bench, workload: Workload) -> Iterator[Record]:
    """W2: requests of mixed lengths, all at once."""
    warmup, repeats = bench.times(workload)
    for trial in range(warmup):
        bench.backend.run(draw(workload, bench.vocab_size, trial))
    seconds: list[float] = []
    for done in range(1, repeats + 1):
        requests = draw(workload, bench.vocab_size, warmup + done)
        seconds.append(bench.backend.run(requests).seconds)
        median = statistics.median(seconds)
        prompt, output = (
            sum(len(request.prompt) for request in requests),
            sum(request.output for request in requests),
        )
        measured = {
            "seconds": median,
            "output_tokens_per_second": output / median,
            "tokens_per_second": (prompt + output) / median,
        }
        record: Record = {"measured": measured}
        if bench.ceilings is not None:
            floor = batch_floor(bench.shape, bench.ceilings, extents(requests))
            measured["share_of_floor"] = floor / median
            record["floor"] = rounded({"seconds": floor})
        record["measured"] = rounded(measured)
        record["repeats"] = {"seconds": rounded_list(seconds)}
        record["at"] = {"requests": len(requests), "prompt_tokens": prompt, "output_tokens": output}
        yield {**record, "partial": True} if done < repeats else record


def measure_first_minute(bench: Bench, workload: Workload) -> Iterator[Record]:
    """Requests as an engine's first ones, then new ones of the same lengths."""
    rounds = [
        bench.backend.run(draw(workload, bench.vocab_size, trial)).seconds for trial in (1, 2)
    ]
    measured = {
        "first_seconds": rounds[0],
        "second_seconds": rounds[1],
        "first_over_second": rounds[0] / rounds[1],
    }
    yield {"measured": rounded(measured), "at": {"requests": workload.requests}}


def measure_prefill(bench: Bench, workload: Workload) -> Iterator[Record]:
    """W3: long prompts, one token each."""
    warmup, repeats = bench.times(workload)
    for trial in range(warmup):
        bench.backend.run(draw(workload, bench.vocab_size, trial))
    seconds: list[float] = []
    for done in range(1, repeats + 1):
        requests = draw(workload, bench.vocab_size, warmup + done)
        seconds.append(bench.backend.run(requests).seconds)
        median = statistics.median(seconds)
        tokens = sum(len(request.prompt) for request in requests)
        measured = {"seconds": median, "prompt_tokens_per_second": tokens / median}
        record: Record = {"measured": measured}
        if bench.ceilings is not None:
            floor = prefill_floor(bench.shape, bench.ceilings, extents(requests))
            flops = prefill_flops(bench.shape, extents(requests))
            measured["share_of_floor"] = floor / median
            record["floor"] = rounded(
                {"seconds": floor, "prompt_tokens_per_second": tokens / floor, "flops": flops}
            )
        record["measured"] = rounded(measured)
        record["repeats"] = {"seconds": rounded_list(seconds)}
        record["at"] = {"requests": len(requests), "prompt": workload.prompt[0]}
        yield {**record, "partial": True} if done < repeats else record


def measure_context(bench: Bench, workload: Workload) -> Iterator[Record]:
    """W4: decoding over long contexts, whose prompts are in the prefix cache after a first run.

    All prompts must fit in the KV cache together.
    """
    warmup, repeats = bench.times(workload)
    for trial in range(1, warmup + 1):
        others = draw(workload, bench.vocab_size, trial)
        for each in (cut(others, 1), others):
            bench.backend.run(each)
        bench.backend.forget()
    requests = draw(workload, bench.vocab_size, 0)
    first = cut(requests, 1)
    tokens = sum(len(request.prompt) for request in requests)
    cold = bench.backend.run(first).seconds
    at = {"requests": len(requests), "prompt": workload.prompt[0], "output": workload.output[0]}
    prefilled: Record = {"prefill_tokens_per_second": tokens / cold, "prefill_seconds": cold}
    yield {"measured": rounded(prefilled), "at": at, "partial": True}
    bench.backend.run(requests)
    seconds = [bench.backend.run(first).seconds for _ in range(repeats)]
    whole: list[float] = []
    for done in range(1, repeats + 1):
        outcome = bench.backend.run(requests)
        whole.append(outcome.seconds)
        step = (statistics.median(whole) - statistics.median(seconds)) / (workload.output[0] - 1)
        measured = {
            "ms_per_step": 1e3 * step,
            "decode_tokens_per_second": len(requests) / step,
            "prompt_share_cached": outcome.cached_tokens / tokens,
            **prefilled,
        }
        record: Record = {"measured": measured}
        if bench.ceilings is not None:
            context = tokens + len(requests) * workload.output[0] / 2
            floor = decode_step_floor(bench.shape, bench.ceilings, len(requests), context)
            measured["share_of_floor"] = floor / step
            record["floor"] = rounded({"ms_per_step": 1e3 * floor})
        record["measured"] = rounded(measured)
        record["repeats"] = {"whole_s": rounded_list(whole), "first_s": rounded_list(seconds)}
        record["at"] = at
        yield {**record, "partial": True} if done < repeats else record


def measure_chats(bench: Bench, workload: Workload) -> Iterator[Record]:
    """W7: chats that resend their history at each turn."""
    warmup, repeats = bench.times(workload)
    trials = []
    for trial in range(warmup + repeats):
        bench.backend.forget()
        result = _chat(bench, workload, trial)
        if trial >= warmup:
            trials.append(result)
    seconds = [trial[0] for trial in trials]
    median = statistics.median(seconds)
    sizes, cached = trials[-1][1], trials[-1][2]
    output = sum(size.output for turn in sizes for size in turn)
    prompt = sum(size.prompt for turn in sizes for size in turn)
    measured = {
        "seconds": median,
        "output_tokens_per_second": output / median,
        "prompt_tokens_per_second": prompt / median,
        "prefix_hit_rate": cached / prompt,
    }
    record: Record = {"measured": measured}
    if bench.ceilings is not None:
        floor = sum(batch_floor(bench.shape, bench.ceilings, turn) for turn in sizes)
        measured["share_of_floor"] = floor / median
        record["floor"] = {"seconds": floor, "prefix_hit_rate": _most_cached(sizes) / prompt}
        record["floor"] = rounded(record["floor"])
    record["measured"] = rounded(measured)
    record["repeats"] = {"seconds": rounded_list(seconds)}
    record["at"] = {"chats": workload.requests, "turns": workload.turns, "system": workload.system}
    yield record


def _chat(bench: Bench, workload: Workload, trial: int) -> tuple[float, list[list[Extent]], int]:
    """Run all turns; return (seconds, sizes by turn with the cacheable part, cached tokens)."""
    usable = bench.vocab_size - bench.vocab_size // 150
    start = [(trial + 17 * token) % usable for token in range(workload.system)]
    histories = [list(start) for _ in range(workload.requests)]
    num_cached = [workload.system if chat else 0 for chat in range(workload.requests)]
    seconds, cached, sizes = 0.0, 0, []
    for turn in range(workload.turns):
        words = draw(workload, bench.vocab_size, 1000 * trial + turn, turn=turn)
        requests = [
            BenchRequest(history + addition.prompt, addition.output)
            for history, addition in zip(histories, words, strict=True)
        ]
        sizes.append(extents(requests, num_cached))
        outcome = bench.backend.run(requests)
        seconds, cached = seconds + outcome.seconds, cached + outcome.cached_tokens
        histories = [
            request.prompt + result
            for request, result in zip(requests, outcome.token_ids, strict=True)
        ]
        num_cached = [len(history) - 1 for history in histories]
    return seconds, sizes, cached


def _most_cached(sizes: list[list[Extent]]) -> int:
    return sum(size.cached for turn in sizes for size in turn)


def run(argv: list[str]) -> int:
    from .session import run_workloads

    kinds: tuple[Kind, ...] = ("batch", "prefill", "context", "chats")
    return run_workloads("throughput", argv, kinds=kinds, default=("W2",))
