"""Metrics of an engine's ranks, read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..protocols.executors import RankState


class RankMetrics:
    def __init__(self, model_name: str, ranks: Callable[[], Sequence[RankState]]) -> None:
        self._model = model_name
        self._ranks = ranks

    def collect(self) -> Iterable[Metric]:
        labels = ["model_name", "rank", "host"]
        steps = CounterMetricFamily(
            "jackfield:rank_steps", "Steps and jobs that the rank has finished.", labels=labels
        )
        memory = GaugeMetricFamily(
            "jackfield:rank_memory_bytes",
            "Bytes of the rank's device that weights and kv_cache take.",
            labels=[*labels, "kind"],
        )
        for rank in self._ranks():
            own = [self._model, str(rank.rank), rank.host]
            steps.add_metric(own, rank.steps)
            memory.add_metric([*own, "weights"], rank.weight_bytes)
            memory.add_metric([*own, "kv_cache"], rank.kv_cache_bytes)
        return [steps, memory]
