"""`MetricsKit`: whether a plugin's metrics can be scraped, added up over processes, and stay few.

    class TestMine(MetricsKit):
        plugin = my_package.plugin                  # the module, or object, with the hook
        counts = {"mine_requests_total": 1.0}       # what each request adds, all labels together

The hook is `register_metrics`; the plugin's other hooks, which count, run as in any engine.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import prometheus_client
import pytest
from prometheus_client.metrics_core import Metric

from ...core.config import EngineConfig
from ...core.engine.async_engine import AsyncEngine
from ...core.sampling_params import SamplingParams
from .kit import Kit

ADDED = frozenset({"counter", "gauge", "histogram", "summary", "gaugehistogram"})
"""Types of which the values of several processes make sense as a sum."""
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


class MetricsKit(Kit):
    """Subclass it, and set the plugin."""

    counts: ClassVar[Mapping[str, float]] = {}
    """Sample, with its suffix → what one request adds to it, over all labels."""

    def families(self, registry: Any) -> list[Metric]:
        """Return what a scrape finds."""
        return list(registry.collect())

    def registered_in(self, registry: Any, engine: Any) -> None:
        """Call the plugin's hook as the engine does."""
        plugin = self.plugin
        if plugin is None or not hasattr(plugin, "register_metrics"):
            pytest.fail("set `plugin` to the module or object with `register_metrics`")
        plugins = self.plugins()
        for impl in plugins.implementations("register_metrics"):
            if impl.plugin is plugin:
                plugins.call(impl, registry=registry, engine=engine)

    def serve(self, count: int) -> dict[str, dict[tuple[Any, ...], float]]:
        """Return the plugin's samples when an engine has stopped after `count` requests: name →
        labels → value."""
        registry = prometheus_client.CollectorRegistry()
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)

        async def run() -> None:
            config = EngineConfig(device="cpu", max_model_len=64, num_gpu_blocks_override=40)
            async with AsyncEngine(config, plugins=self.plugins()) as engine:
                # What the hook counts in is the registry that it was called with last.
                self.registered_in(registry, engine)
                for number in range(count):
                    stream = engine.generate([5, 6 + number], params, request_id=f"kit-{number}")
                    async for _ in stream:
                        pass

        asyncio.run(run())
        samples: dict[str, dict[tuple[Any, ...], float]] = {}
        for family in self.families(registry):
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    labels = tuple(sorted(sample.labels.items()))
                    samples.setdefault(sample.name, {})[labels] = sample.value
        return samples

    # -------------------------------------------------------------- tests

    def test_names_types_and_helps_are_those_of_prometheus(self) -> None:
        registry = prometheus_client.CollectorRegistry()
        self.registered_in(registry, ENGINE)
        families = self.families(registry)
        assert families, "nothing was registered in the registry that the hook was given"
        for family in families:
            assert NAME.fullmatch(family.name), family.name
            assert not family.name.startswith(("jackfield:", "vllm:")), f"{family.name} is taken"
            assert family.documentation, f"{family.name} has no help"
            assert family.type in ADDED, (
                f"{family.name} is of type {family.type}, which cannot be added over processes"
            )

    def test_nothing_is_in_the_global_registry(self) -> None:
        """There may be several engines in a process, each with metrics of its own."""
        before = {family.name for family in prometheus_client.REGISTRY.collect()}
        registries = [prometheus_client.CollectorRegistry() for _ in range(2)]
        for registry in registries:  # The second one as in another front end.
            self.registered_in(registry, ENGINE)
        names = [{family.name for family in self.families(each)} for each in registries]
        assert names[0] == names[1], "a second engine has other metrics"
        after = {family.name for family in prometheus_client.REGISTRY.collect()}
        assert after == before, "use the registry that the hook gets"

    def test_a_scrape_changes_nothing(self) -> None:
        registry = prometheus_client.CollectorRegistry()
        self.registered_in(registry, ENGINE)
        first = [family.samples for family in self.families(registry)]
        assert [family.samples for family in self.families(registry)] == first

    def test_requests_are_counted_once(self) -> None:
        """In the process where each happens."""
        if not self.counts:
            pytest.skip("the kit was told of nothing that is counted: give it counts")
        before, three, five = (self.serve(count) for count in (0, 3, 5))
        for name, each in self.counts.items():
            values = [sum(scrape.get(name, {}).values()) for scrape in (before, three, five)]
            assert values == [values[0], values[0] + 3 * each, values[0] + 5 * each], name

    def test_series_do_not_grow_with_requests(self) -> None:
        """A label that has a request's id, its text or its time makes a series of each request."""
        some, more = self.serve(3), self.serve(6)
        for name, series in more.items():
            assert len(series) <= len(some.get(name, series)), f"{name} has series of requests"


ENGINE = SimpleNamespace(info=None, config=EngineConfig(device="cpu"))
"""Stands for an engine where nothing is asked of it but its configuration."""
