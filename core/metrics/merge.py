"""Merges metrics of several processes: values are added up, series by series."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import prometheus_client as prometheus
from prometheus_client.core import Metric


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a metric."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True):
    """One metric with all its series."""

    name: str
    text: str
    kind: str
    """Prometheus' type: counter, gauge, histogram, …"""
    samples: list[Sample]


def families(registry: prometheus.CollectorRegistry) -> list[Family]:
    """Return the current metrics of a registry."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [Sample(one.name, dict(one.labels), float(one.value)) for one in metric.samples],
        )
        for metric in registry.collect()
    ]


def merged(told: Iterable[list[Family]]) -> list[Family]:
    """Add up equal series; keep the earliest creation time."""
    found: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for some in told:
        for family in some:
            found.setdefault(family.name, family)
            series = values.setdefault(family.name, {})
            for one in family.samples:
                key = (one.name, tuple(sorted(one.labels.items())))
                if key not in series:
                    series[key] = one.value
                elif one.name.endswith("_created"):
                    series[key] = min(series[key], one.value)
                else:
                    series[key] += one.value
    return [
        Family(
            family.name,
            family.text,
            family.kind,
            [Sample(key[0], dict(key[1]), value) for key, value in values[family.name].items()],
        )
        for family in found.values()
    ]


def render(some: Iterable[Family]) -> bytes:
    """Render in Prometheus' text format."""
    metrics = []
    for family in some:
        metric = Metric(family.name, family.text, family.kind)
        for one in family.samples:
            metric.add_sample(one.name, one.labels, one.value)
        metrics.append(metric)
    text: bytes = prometheus.generate_latest(_Told(metrics))
    return text


class _Told(prometheus.CollectorRegistry):
    def __init__(self, metrics: list[Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
