"""Metrics of front ends; any of them reports for all."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily

REQUESTS = "jackfield:frontend_requests"
CPU = "jackfield:frontend_cpu_seconds"


class FrontendMetrics:
    """A `prometheus_client` collector of one front end's counters."""

    def __init__(self, front: int, num_requests: Callable[[], int]) -> None:
        """num_requests: returns inference requests received."""
        self._labels = [str(front)]
        self._num_requests = num_requests

    def describe(self) -> Iterable[CounterMetricFamily]:
        return [self._family(REQUESTS, "Requests for work that a front end has taken."),
                self._family(CPU, "Processor time of a front end.")]  # fmt: skip

    def collect(self) -> Iterable[CounterMetricFamily]:
        requests, cpu = self.describe()
        requests.add_metric(self._labels, self._num_requests())
        rusage = resource.getrusage(resource.RUSAGE_SELF)
        cpu.add_metric(self._labels, rusage.ru_utime + rusage.ru_stime)
        return [requests, cpu]

    def _family(self, name: str, text: str) -> CounterMetricFamily:
        return CounterMetricFamily(name, text, labels=["frontend"])
