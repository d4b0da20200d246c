"""`jackfield bench latency`: milliseconds per token at batch size 1 (W1), and time of a decode step
by batch size.

Both subtract from the time of a whole generation that of a generation of one token.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import msgspec

from ..report import percentile
from ..roofline import decode_step_floor
from ..types import Bench, Record, rounded
from ..workloads import BenchRequest, Workload, draw


def cut(requests: list[BenchRequest], output: int) -> list[BenchRequest]:
    return [BenchRequest(request.prompt, output, request.temperature) for request in requests]


class Trials:
    """New prompts per run, so that a prefix cache does not help."""

    def __init__(self, bench: Bench, workload: Workload, first_trial: int = 0) -> None:
        self._bench, self._workload, self._trial = bench, workload, first_trial

    def seconds(self, rows: int, output: int) -> float:
        """Return the time of `rows` concurrent requests with `output` tokens each."""
        self._trial += 1
        requests = draw(self._workload, self._bench.vocab_size, self._trial, requests=rows)
        return self._bench.backend.run(cut(requests, output)).seconds


def measure_latency(bench: Bench, workload: Workload) -> Iterator[Record]:
    """W1: one request alone."""
    trials = Trials(bench, workload)
    warmup, repeats = bench.times(workload)
    prompt, output = workload.prompt[0], workload.output[0]
    for _ in range(warmup):
        trials.seconds(1, output)
        trials.seconds(1, 1)
    whole: list[float] = []
    firsts = [trials.seconds(1, 1) for _ in range(repeats + 2)]
    for done in range(1, repeats + 1):
        whole.append(trials.seconds(1, output))
        record = _latency(bench, statistics.median(whole), statistics.median(firsts), workload)
        record["repeats"] = {"whole_s": rounded_list(whole), "first_s": rounded_list(firsts)}
        record["at"] = {"batch": 1, "prompt": prompt, "output": output}
        yield {**record, "partial": True} if done < repeats else record


def _latency(bench: Bench, whole: float, first: float, workload: Workload) -> Record:
    prompt, output = workload.prompt[0], workload.output[0]
    step = (whole - first) / (output - 1)
    measured = {
        "ms_per_token": 1e3 * step,
        "first_token_ms": 1e3 * first,
        "tokens_per_second": output / whole,
    }
    record: Record = {"measured": measured}
    if bench.ceilings is not None:
        floor = decode_step_floor(bench.shape, bench.ceilings, 1, prompt + output / 2)
        measured["share_of_floor"] = floor / step
        record["floor"] = {"ms_per_token": 1e3 * floor}
        record["floor"]["weight_bytes"] = bench.shape.step_weight_bytes(1)
    return {key: rounded(value) for key, value in record.items()}


def measure_decode(bench: Bench, workload: Workload) -> Iterator[Record]:
    trials = Trials(bench, workload)
    warmup, repeats = bench.times(workload)
    prompt, output = workload.prompt[0], workload.output[0]
    for rows in workload.batches:
        for _ in range(warmup):
            trials.seconds(rows, output)
            trials.seconds(rows, 1)
        whole = [trials.seconds(rows, output) for _ in range(repeats)]
        firsts = [trials.seconds(rows, 1) for _ in range(repeats)]
        step = (statistics.median(whole) - statistics.median(firsts)) / (output - 1)
        measured = {"ms_per_step": 1e3 * step, "tokens_per_second": rows / step}
        record: Record = {"measured": measured}
        if bench.ceilings is not None:
            context = rows * (prompt + output / 2)
            floor = decode_step_floor(bench.shape, bench.ceilings, rows, context)
            measured["share_of_floor"] = floor / step
            record["floor"] = {"ms_per_step": 1e3 * floor}
        record = {key: rounded(value) for key, value in record.items()}
        record["repeats"] = {"whole_s": rounded_list(whole), "first_s": rounded_list(firsts)}
        yield {**record, "at": {"batch": rows, "prompt": prompt, "output": output}}


def measure_first_token(bench: Bench, workload: Workload) -> Iterator[Record]:
    """Measure the time to the first token of one request, by prompt length."""
    for length in workload.lengths:
        # Separate trials: within one trial, a longer prompt starts with the shorter one.
        each = msgspec.structs.replace(workload, prompt=(length, length))
        trials = Trials(bench, each, first_trial=1000 * length)
        for _ in range(bench.times(workload)[0]):
            trials.seconds(1, 1)
        seconds = [trials.seconds(1, 1) for _ in range(workload.requests)]
        measured = {
            "first_token_ms": 1e3 * statistics.median(seconds),
            "first_token_p90_ms": 1e3 * percentile(seconds, 90),
        }
        record: Record = {"measured": rounded(measured)}
        yield {**record, "at": {"prompt": length, "requests": workload.requests}}


def rounded_list(values: list[float]) -> list[float]:
    return [round(value, 6) for value in values]


def run(argv: list[str]) -> int:
    from .session import run_workloads

    return run_workloads(
        "latency", argv, kinds=("latency", "decode", "first"), default=("W1", "decode")
    )
