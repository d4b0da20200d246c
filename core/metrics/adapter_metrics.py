"""Metrics of an engine's adapters, read when they are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

MAX_NAMES = 32
"""Names in a label."""


class AdapterCounts(msgspec.Struct, frozen=True):
    """How an engine's adapters are doing."""

    registered: int = 0
    loaded: int = 0
    resident: int = 0
    host_bytes: int = 0
    requests_waiting: int = 0
    reads: int = 0
    read_seconds: float = 0.0
    loads: int = 0
    evictions: int = 0
    turns_given: int = 0
    running_names: tuple[str, ...] = ()
    """Of adapters that everyone may use, and that requests run with."""
    waiting_names: tuple[str, ...] = ()


class AdapterMetrics:
    """A collector, for engines with adapters."""

    def __init__(
        self, model_name: str, max_loras: int, counts: Callable[[], AdapterCounts]
    ) -> None:
        self._model = model_name
        self._max_loras = max_loras
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """Return the metrics for Prometheus."""
        counts = self._counts()
        gauges: tuple[tuple[str, str, float], ...] = (
            ("lora_registered", "Adapters that are known by name.", counts.registered),
            ("lora_loaded", "Adapters in host memory.", counts.loaded),
            ("lora_resident", "Adapters in the device's memory.", counts.resident),
            ("lora_host_bytes", "Bytes of adapters in each rank's memory.", counts.host_bytes),
            (
                "lora_requests_waiting",
                "Requests that wait until their adapter is read, or has room on the device.",
                counts.requests_waiting,
            ),
        )
        counters: tuple[tuple[str, str, float], ...] = (
            ("lora_reads", "Adapters read into host memory.", counts.reads),
            ("lora_read_seconds", "Seconds that this took.", counts.read_seconds),
            ("lora_loads", "Adapters loaded to the device.", counts.loads),
            ("lora_evictions", "Adapters that made room on the device for others.",
             counts.evictions),
            ("lora_turns_given", "Adapters that waited longer than lora_max_wait_steps.",
             counts.turns_given),
        )  # fmt: skip
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"jackfield:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(f"jackfield:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        info = GaugeMetricFamily(
            "jackfield:lora_requests_info",
            f"The time; labels: up to {MAX_NAMES} adapters each that requests run with, and wait "
            "for. Adapters of tenants are left out.",
            labels=["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        names = (",".join(n[:MAX_NAMES]) for n in (counts.running_names, counts.waiting_names))
        info.add_metric([self._model, str(self._max_loras), *names], time.time())
        yield info
