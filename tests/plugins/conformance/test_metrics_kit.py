"""The kit of metrics: a right plugin passes it, and planted bugs do not."""

from __future__ import annotations

import itertools
from typing import Any

import prometheus_client as prometheus
import pytest
from mutants import run_kit

from jackfield import hookimpl
from jackfield.core.hook_versions import API_VERSION
from jackfield.plugins.conformance.metrics import MetricsKit


class Right:
    """Counts requests, and measures their prompts."""

    jackfield_api = API_VERSION

    @hookimpl
    def register_metrics(self, registry: Any, engine: Any) -> None:
        self.requests = prometheus.Counter("own_requests", "Requests.", ["why"], registry=registry)
        self.prompts = prometheus.Histogram("own_prompts", "Tokens of prompts.", registry=registry)

    @hookimpl
    def request_finished(self, output: Any) -> None:
        self.requests.labels(output.outputs[0].finish_reason).inc()
        self.prompts.observe(len(output.prompt_token_ids))


class Kit(MetricsKit):
    plugin = Right()
    counts = {"own_requests_total": 1.0, "own_prompts_count": 1.0, "own_prompts_sum": 2.0}


class InTheGlobal(Right):
    @hookimpl
    def register_metrics(self, registry: Any, engine: Any) -> None:
        super().register_metrics(registry, engine)
        number = next(NUMBERS)
        prometheus.Counter(f"own_global_{number}", "Lost.")


NUMBERS = itertools.count()


class Once(Right):
    """Its metrics are the process's: a second engine gets none."""

    done = False

    @hookimpl
    def register_metrics(self, registry: Any, engine: Any) -> None:
        if not self.done:
            super().register_metrics(registry, engine)
        self.done = True


class Labelled(Right):
    @hookimpl
    def register_metrics(self, registry: Any, engine: Any) -> None:
        super().register_metrics(registry, engine)
        self.each = prometheus.Counter("own_each", "By id.", ["id"], registry=registry)

    @hookimpl
    def request_finished(self, output: Any) -> None:
        super().request_finished(output)
        self.each.labels(output.request_id).inc()


class Twice(Right):
    @hookimpl
    def request_finished(self, output: Any) -> None:
        super().request_finished(output)
        super().request_finished(output)


class OfSteps(Right):
    """Counts steps for requests."""

    @hookimpl
    def step_finished(self, plan: Any, result: Any) -> None:
        self.requests.labels("step").inc()


class Described(Right):
    @hookimpl
    def register_metrics(self, registry: Any, engine: Any) -> None:
        super().register_metrics(registry, engine)
        prometheus.Info("own_version", "Version.", registry=registry).info({"version": "1"})


class Taken(Right):
    @hookimpl
    def register_metrics(self, registry: Any, engine: Any) -> None:
        super().register_metrics(registry, engine)
        prometheus.Counter("vllm:request_success", "Requests.", registry=registry)


class Helpless(Right):
    @hookimpl
    def register_metrics(self, registry: Any, engine: Any) -> None:
        super().register_metrics(registry, engine)
        prometheus.Gauge("own_gauge", "", registry=registry)


class CountsScrapes(Right):
    @hookimpl
    def register_metrics(self, registry: Any, engine: Any) -> None:
        super().register_metrics(registry, engine)
        self.scrapes = 0
        gauge = prometheus.Gauge("own_scrapes", "Scrapes.", registry=registry)
        gauge.set_function(self.scraped)

    def scraped(self) -> float:
        self.scrapes += 1
        return self.scrapes


class FailsAlone(Right):
    """The event's argument has another attribute."""

    @hookimpl
    def request_finished(self, output: Any) -> None:
        self.requests.labels(output.finish_reason).inc()


class Nowhere(Right):
    @hookimpl
    def register_metrics(self, registry: Any, engine: Any) -> None:
        super().register_metrics(prometheus.CollectorRegistry(), engine)


NAMES = "test_names_types_and_helps_are_those_of_prometheus"
GLOBAL = "test_nothing_is_in_the_global_registry"
SCRAPE = "test_a_scrape_changes_nothing"
COUNTED = "test_requests_are_counted_once"
SERIES = "test_series_do_not_grow_with_requests"
MUTANTS: dict[str, tuple[type, str]] = {
    "in the global registry": (InTheGlobal, GLOBAL),
    "the first engine's alone": (Once, GLOBAL),
    "a label of each request": (Labelled, SERIES),
    "counted twice": (Twice, COUNTED),
    "counted by step": (OfSteps, COUNTED),
    "what cannot be added": (Described, NAMES),
    "a taken name": (Taken, NAMES),
    "no help": (Helpless, NAMES),
    "a scrape counts": (CountsScrapes, SCRAPE),
    "the listener fails": (FailsAlone, COUNTED),
    "in a registry of its own": (Nowhere, NAMES),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_kit_notices(name: str) -> None:
    planted, fails = MUTANTS[name]
    kit = type("TestMutant", (Kit,), {"plugin": planted()})
    assert run_kit(kit, {fails}).by_outcome["failed"] == {fails}


def test_the_kit_passes_what_is_right() -> None:
    outcomes = run_kit(type("TestGood", (Kit,), {}))
    assert not outcomes.by_outcome["failed"], outcomes.reasons
