"""Merges metrics of processes by adding series."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import prometheus_client as prometheus
from prometheus_client.core import Metric


class Sample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True):
    name: str
    text: str
    kind: str
    """Prometheus' type: counter, gauge, histogram, …"""
    samples: list[Sample]


def families(registry: prometheus.CollectorRegistry) -> list[Family]:
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [
                Sample(sample.name, dict(sample.labels), float(sample.value))
                for sample in metric.samples
            ],
        )
        for metric in registry.collect()
    ]


def merged(scrapes: Iterable[list[Family]]) -> list[Family]:
    """Add up equal series, with the earliest creation time."""
    by_name: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for some in scrapes:
        for family in some:
            by_name.setdefault(family.name, family)
            series = values.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                if key not in series:
                    series[key] = sample.value
                elif sample.name.endswith("_created"):
                    series[key] = min(series[key], sample.value)
                else:
                    series[key] += sample.value
    return [
        Family(
            family.name,
            family.text,
            family.kind,
            [Sample(key[0], dict(key[1]), value) for key, value in values[family.name].items()],
        )
        for family in by_name.values()
    ]


def render(some: Iterable[Family]) -> bytes:
    metrics = []
    for family in some:
        metric = Metric(family.name, family.text, family.kind)
        for sample in family.samples:
            metric.add_sample(sample.name, sample.labels, sample.value)
        metrics.append(metric)
    text: bytes = prometheus.generate_latest(_Told(metrics))
    return text


class _Told(prometheus.CollectorRegistry):
    def __init__(self, metrics: list[Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
