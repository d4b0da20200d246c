"""What each front end counts of its own, for `GET /metrics` of whichever of them."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily

REQUESTS = "jackfield:frontend_requests"
CPU = "jackfield:frontend_cpu_seconds"


class FrontCounts:
    """A collector for a registry of `prometheus_client`."""

    def __init__(self, front: int, requests: Callable[[], int]) -> None:
        """requests: how many it has taken."""
        self._labels = [str(front)]
        self._requests = requests

    def describe(self) -> Iterable[CounterMetricFamily]:
        """The names, without values."""
        return [self._family(REQUESTS, "Requests for work that a front end has taken."),
                self._family(CPU, "Processor time of a front end.")]  # fmt: skip

    def collect(self) -> Iterable[CounterMetricFamily]:
        """All that was counted."""
        requests, cpu = self.describe()
        requests.add_metric(self._labels, self._requests())
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu.add_metric(self._labels, used.ru_utime + used.ru_stime)
        return [requests, cpu]

    def _family(self, name: str, text: str) -> CounterMetricFamily:
        return CounterMetricFamily(name, text, labels=["frontend"])
