"""A Prometheus histogram that records many equal values at the cost of one."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Sequence

import prometheus_client as prometheus
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Histogram:
    """One series. `prometheus_client`'s histogram needs a call of several µs per value; a step of
    256 streams has 256 mostly equal latencies.

    For the event loop only.
    """

    def __init__(
        self,
        name: str,
        text: str,
        buckets: Sequence[float],
        labels: dict[str, str],
        registry: prometheus.CollectorRegistry,
    ) -> None:
        """buckets: ascending upper bounds, without infinity."""
        self.name, self.text = name, text
        self._labels = labels
        self._bounds = [float(bound) for bound in buckets]
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        self._created = time.time()
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return [HistogramMetricFamily(self.name, self.text, labels=list(self._labels))]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self.name, self.text, labels=list(self._labels))
        below = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            below += count
            buckets.append((floatToGoString(bound), below))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        family.add_sample(f"{self.name}_created", self._labels, self._created)
        return [family]
