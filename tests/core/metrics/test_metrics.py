"""EngineMetrics: what each observation adds to the text that Prometheus reads."""

from __future__ import annotations

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jackfield import RequestOutput, SamplingParams
from jackfield.core.metrics.histogram import Histogram
from jackfield.core.metrics.metrics import EngineMetrics
from jackfield.core.outputs import CompletionOutput, EngineStats, RequestTimings


def samples(metrics: EngineMetrics) -> dict[str, float]:
    """Sample name, with its labels but the model's, → value."""
    entries = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            text = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            entries[sample.name.removeprefix("jackfield:") + (f"[{text}]" if text else "")] = (
                sample.value
            )
    return entries


def finished(reason: str = "stop", **timings: float) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        outputs=[
            CompletionOutput(index=0, token_ids=[4, 5, 6, 7], finish_reason=reason),  # type: ignore[arg-type]
            CompletionOutput(index=1, token_ids=[4], finish_reason="length"),
        ],
        finished=True,
        timings=RequestTimings(arrival=10.0, **timings),  # type: ignore[arg-type]
    )


def test_counters_grow_by_what_the_snapshots_grew() -> None:
    metrics = EngineMetrics("m")
    for _ in range(2):
        metrics.observe_step(7, 0.005, 0.0)
    metrics.observe_stats(EngineStats(prompt_tokens=5, generation_tokens=2))
    metrics.observe_stats(EngineStats(prompt_tokens=5, generation_tokens=9, num_preemptions=1))
    values = samples(metrics)
    assert values["prompt_tokens_total"] == 5
    assert values["generation_tokens_total"] == 9
    assert values["num_preemptions_total"] == 1
    assert values["iteration_tokens_total_count"] == 2
    assert values["iteration_tokens_total_sum"] == 14
    assert values["iteration_seconds_sum"] == pytest.approx(0.01)


def test_gauges_show_the_last_snapshot() -> None:
    metrics = EngineMetrics("m")
    metrics.observe_step(3, 0.01, 0.0)
    metrics.observe_stats(EngineStats(num_requests_running=3, kv_cache_usage=0.5))
    metrics.observe_stats(EngineStats(num_requests_waiting=2))
    values = samples(metrics)
    assert values["num_requests_running"] == 0
    assert values["num_requests_waiting"] == 2
    assert values["kv_cache_usage_perc"] == 0
    assert values["iteration_tokens_total_count"] == 1


def test_a_finished_request_is_cut_into_its_phases() -> None:
    metrics = EngineMetrics("m")
    metrics.observe_finished(
        finished(first_scheduled=11.0, first_token=13.0, last_token=16.0, finished=18.0),
        SamplingParams(n=2, max_tokens=20),
    )
    values = samples(metrics)
    for name, seconds in (
        ("e2e_request_latency_seconds", 8),
        ("request_queue_time_seconds", 1),
        ("request_prefill_time_seconds", 2),
        ("request_decode_time_seconds", 3),
        ("request_inference_time_seconds", 5),
        ("request_time_per_output_token_seconds", 1),
        ("request_prompt_tokens", 3),
        ("request_generation_tokens", 5),
        ("request_params_n", 2),
        ("request_params_max_tokens", 20),
    ):
        assert values[f"{name}_sum"] == seconds, name
        assert values[f"{name}_count"] == 1, name


def test_a_request_aborted_before_its_turn_has_no_phases() -> None:
    metrics = EngineMetrics("m")
    metrics.observe_finished(finished("abort", finished=12.0), SamplingParams())
    values = samples(metrics)
    assert values["e2e_request_latency_seconds_sum"] == 2
    assert values["request_queue_time_seconds_count"] == 0
    assert values["request_params_max_tokens_count"] == 0


def test_finished_completions_are_counted_by_reason() -> None:
    metrics = EngineMetrics("m")
    metrics.observe_stats(EngineStats(requests_finished={"stop": 2}))
    metrics.observe_stats(EngineStats(requests_finished={"stop": 3, "abort": 1}))
    values = samples(metrics)
    assert values["request_success_total[finished_reason=stop]"] == 3
    assert values["request_success_total[finished_reason=abort]"] == 1


def test_token_latencies_count_each_token() -> None:
    metrics = EngineMetrics("m")
    metrics.observe_first_token(0.3)
    metrics.observe_inter_token(0.02, 3)
    values = samples(metrics)
    assert values["time_to_first_token_seconds_bucket[le=0.25]"] == 0
    assert values["time_to_first_token_seconds_bucket[le=0.5]"] == 1
    assert values["inter_token_latency_seconds_count"] == 3
    assert values["inter_token_latency_seconds_sum"] == pytest.approx(0.06)


def test_engines_keep_apart_and_say_how_their_cache_is_made() -> None:
    first, other = EngineMetrics("one"), EngineMetrics("other")
    first.observe_cache_config(block_size=16, num_gpu_blocks=100)
    first.observe_first_token(1.0)
    assert samples(first)["cache_config_info[block_size=16,num_gpu_blocks=100]"] == 1
    assert b'model_name="one"' in first.render() and b"one" not in other.render()
    assert samples(other)["time_to_first_token_seconds_count"] == 0


def test_a_histogram_tells_what_the_library_s_own_would() -> None:
    values = [0.0, 0.1, 0.100001, 0.5, 2.0, 7.0, 100.0, -1.0]
    ours, theirs = prometheus_client.CollectorRegistry(), prometheus_client.CollectorRegistry()
    histogram = Histogram("seconds", "Some.", (0.1, 0.5, 2), {"model_name": 'a"b'}, ours)
    reference = prometheus_client.Histogram(
        "seconds", "Some.", ["model_name"], buckets=(0.1, 0.5, 2), registry=theirs
    ).labels('a"b')
    for times, value in enumerate(values):
        histogram.observe(value, times)
        for _ in range(times):
            reference.observe(value)

    def exposition(registry: prometheus_client.CollectorRegistry) -> list[str]:
        lines = prometheus_client.generate_latest(registry).decode().splitlines()
        return [line for line in lines if not line.startswith("seconds_created")]

    assert exposition(ours) == exposition(theirs)
    with pytest.raises(ValueError, match="seconds"):
        Histogram("seconds", "Again.", (1,), {"model_name": "x"}, ours)
