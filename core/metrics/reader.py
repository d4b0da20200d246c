"""Reads rendered metrics back, in the form of vLLM's `LLM.get_metrics`."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


class Counter(msgspec.Struct, frozen=True):
    """A number that only rises; its name has no `_total`."""

    name: str
    labels: dict[str, str]
    value: int


class Gauge(msgspec.Struct, frozen=True):
    """A number of now."""

    name: str
    labels: dict[str, str]
    value: float


class Histogram(msgspec.Struct, frozen=True):
    """How often values up to each bound were observed."""

    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]
    """Upper bound → observations up to it; the last is "+Inf"."""


Metric: TypeAlias = Counter | Gauge | Histogram


def read_metrics(text: str) -> list[Metric]:
    """Return the metrics of a rendering for Prometheus."""
    metrics: list[Metric] = []
    for family in text_string_to_metric_families(text):
        if family.type == "counter":
            metrics += [
                Counter(family.name, sample.labels, int(sample.value))
                for sample in family.samples
                if sample.name == f"{family.name}_total"
            ]
        elif family.type == "gauge":
            metrics += [Gauge(family.name, each.labels, each.value) for each in family.samples]
        elif family.type == "histogram":
            metrics += _histograms(family.name, family.samples)
    return metrics


def _histograms(name: str, samples: list[Sample]) -> list[Histogram]:
    series: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in samples:
        labels = {key: value for key, value in sample.labels.items() if key != "le"}
        part = sample.labels.get("le") or sample.name.removeprefix(f"{name}_")
        series.setdefault(tuple(sorted(labels.items())), {})[part] = sample.value
    return [
        Histogram(
            name,
            dict(labels),
            int(parts.pop("count")),
            parts.pop("sum"),
            {bound: int(count) for bound, count in parts.items() if bound != "created"},
        )
        for labels, parts in series.items()
    ]
