"""Statistics of a load: rates and percentiles, as a record or as vLLM's result file."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from ..report import percentile
from ..types import Record, rounded
from .clients import LoadResult
from .load import RequestResult

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to the first token, per later token, between chunks, end to end."""
CACHE_COUNTER = re.compile(r"^\w+:prefix_cache_(hits|queries)(?:_total)?(?:\{[^}]*\})? (\S+)", re.M)

LAUNCH_WAIT = re.compile(r'^jackfield:launch_wait_seconds_bucket\{.*?le="([^"]+)".*?\} (\S+)', re.M)
LATE = re.compile(r"^jackfield:late_preparations_total(?:\{[^}]*\})? (\S+)", re.M)


def samples(results: Sequence[RequestResult]) -> dict[str, list[float]]:
    """Return the seconds of each metric over successful requests."""
    good = [each for each in results if each.error is None and each.times]
    return {
        "ttft": [each.ttft for each in good],
        "tpot": [tpot for each in good if (tpot := each.tpot) is not None],
        "itl": [gap for each in good for gap in each.itl],
        "e2el": [each.e2el for each in good],
    }


def rates(outcome: LoadResult) -> tuple[float, float, float]:
    """Return requests, output tokens, and all tokens per second, over successful requests."""
    good = [each for each in outcome.results if each.error is None]
    output = sum(each.output_tokens for each in good)
    prompt = sum(each.prompt_tokens for each in good)
    return (
        len(good) / outcome.seconds,
        output / outcome.seconds,
        (prompt + output) / outcome.seconds,
    )


def summarize(
    runs: Sequence[LoadResult],
    metrics: Sequence[str] = METRICS,
    percents: Sequence[float] = (50, 90, 99),
) -> Record:
    """Return `measured`, `failed`, the first failure's reason, and `repeats`.

    Rates are medians over runs; latencies are percentiles over all requests.
    """
    measured: Record = {"seconds": statistics.median(run.seconds for run in runs)}
    names = ("requests_per_second", "output_tokens_per_second", "tokens_per_second")
    for name, speeds in zip(names, zip(*map(rates, runs), strict=True), strict=True):
        measured[name] = statistics.median(speeds)
    results = [each for run in runs for each in run.results]
    measured |= _latencies("", results, metrics, percents)
    for group in sorted({each.group for each in results} - {""}):
        own = [each for each in results if each.group == group]
        measured |= _latencies(f"{group}_", own, metrics, percents)
    measured["client_cpu_share"] = max(run.cpu_share for run in runs)
    bad = [each for each in results if each.error is not None]
    record: Record = {
        "measured": rounded(measured), "failed": len(bad),
        "repeats": {"seconds": [round(run.seconds, 4) for run in runs]},
    }  # fmt: skip
    if bad:
        record["first_failure"] = bad[0].error
    return record


def _latencies(
    prefix: str,
    results: Sequence[RequestResult],
    metrics: Sequence[str],
    percents: Sequence[float],
) -> Record:
    measured: Record = {}
    for name, values in samples(results).items():
        if name in metrics and values:
            measured[f"{prefix}{name}_mean_ms"] = 1e3 * statistics.fmean(values)
            for percent in percents:
                measured[f"{prefix}{name}_p{percent:g}_ms"] = 1e3 * percentile(values, percent)
    return measured


def cache_counters(metrics: str) -> dict[str, float]:
    """Return the prefix cache's `queries` and `hits` in tokens from /metrics, as far as counted."""
    counters: dict[str, float] = {}
    for name, value in CACHE_COUNTER.findall(metrics):
        counters[name] = counters.get(name, 0.0) + float(value)
    return counters


def late_preparations(metrics: str) -> float | None:
    """Return the number of kernels and graphs that steps waited for; None if unknown."""
    match = LATE.search(metrics)
    return float(match[1]) if match else None


def launch_waits(metrics: str) -> dict[float, float]:
    """Return the launch waits from /metrics: bound in seconds → number of launches delayed at most
    this long; empty if uncounted.
    """
    return {float(bound): float(value) for bound, value in LAUNCH_WAIT.findall(metrics)}


def quantile(before: dict[float, float], after: dict[float, float], share: float) -> float | None:
    """Return the bound for this share of the new counts; None without any."""
    buckets = sorted((bound, count - before.get(bound, 0.0)) for bound, count in after.items())
    if not buckets or buckets[-1][1] <= 0:
        return None
    return next(bound for bound, count in buckets if count >= share * buckets[-1][1])


def result_file(
    runs: Sequence[LoadResult],
    facts: Record,
    metrics: Sequence[str],
    percents: Sequence[float],
    *,
    detailed: bool,
) -> Record:
    """Return the last run in the format of `vllm bench serve --save-result`."""
    outcome = runs[-1]
    good = [each for each in outcome.results if each.error is None]
    requests, output, total = rates(outcome)
    result: Record = {
        **facts,
        "duration": outcome.seconds,
        "completed": len(good),
        "failed": len(outcome.results) - len(good),
        "total_input_tokens": sum(each.prompt_tokens for each in good),
        "total_output_tokens": sum(each.output_tokens for each in good),
        "request_throughput": requests,
        "output_throughput": output,
        "total_token_throughput": total,
    }
    for name, values in samples(outcome.results).items():
        if name in metrics and values:
            result |= dict(_statistics(name, [1e3 * value for value in values], percents))
    if detailed:
        result |= _details(outcome.results)
    return result


def _statistics(
    name: str, values: list[float], percents: Sequence[float]
) -> Iterator[tuple[str, float]]:
    yield f"mean_{name}_ms", statistics.fmean(values)
    yield f"median_{name}_ms", statistics.median(values)
    yield f"std_{name}_ms", statistics.pstdev(values)
    for percent in percents:
        yield f"p{percent:g}_{name}_ms", percentile(values, percent)


def _details(results: Sequence[RequestResult]) -> dict[str, list[Any]]:
    return {
        "input_lens": [each.prompt_tokens for each in results],
        "output_lens": [each.output_tokens for each in results],
        "start_times": [each.sent for each in results],
        "ttfts": [each.ttft if each.times else 0.0 for each in results],
        "itls": [each.itl for each in results],
        "errors": [each.error or "" for each in results],
    }
