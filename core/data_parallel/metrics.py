"""Metrics about members, besides their engines' own."""

from __future__ import annotations

import msgspec
import prometheus_client as prometheus

from ..metrics.merge import Family


class PoolMetrics:
    def __init__(self, model_name: str, num_members: int) -> None:
        self.registry = prometheus.CollectorRegistry()

        def counters(name: str, text: str) -> list[prometheus.Counter]:
            family = prometheus.Counter(
                f"jackfield:{name}", text, ["model_name", "engine"], registry=self.registry
            )
            return [family.labels(model_name, str(member)) for member in range(num_members)]

        up = prometheus.Gauge(
            "jackfield:data_parallel_engine_up",
            "Whether the engine serves.",
            ["model_name", "engine"],
            registry=self.registry,
        )
        self.up = [up.labels(model_name, str(member)) for member in range(num_members)]
        self.restarts = counters("data_parallel_restarts", "Starts of the engine after its end.")
        self.requests = counters("data_parallel_requests", "Requests sent to the engine.")
        self.known_tokens = counters(
            "data_parallel_known_prompt_tokens",
            "Prompt tokens that had been sent to the engine before.",
        )
        self.moved_requests = counters(
            "data_parallel_moved_requests",
            "Requests that other engines got because the engine ended before their first token.",
        )
        self.lost_requests = counters(
            "data_parallel_lost_requests", "Requests that ended with the engine."
        )


def of_member(families: list[Family], member: int) -> list[Family]:
    """Label a member's metrics, as vLLM does."""
    label = {"engine": str(member)}
    return [
        msgspec.structs.replace(
            family,
            samples=[
                msgspec.structs.replace(sample, labels=sample.labels | label)
                for sample in family.samples
            ],
        )
        for family in families
    ]
