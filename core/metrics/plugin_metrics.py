"""Metrics of plugins (`register_metrics`), isolated from each other."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import Metric

from ..errors import PluginError
from ..registry import Plugins, Provenance

logger = logging.getLogger("jackfield.plugins")


def add_plugin_metrics(
    plugins: Plugins, registry: prometheus.CollectorRegistry, engine: Any
) -> None:
    """Call every plugin's `register_metrics` with its own registry within `registry`. A plugin that
    raises, or uses an existing name, has none.

    Raises PluginError for a required one.
    """
    owners = {family.name: "jackfield" for family in registry.collect()}
    for impl in plugins.implementations("register_metrics"):
        provenance = plugins.source(impl)
        own = prometheus.CollectorRegistry()
        try:
            plugins.call(impl, registry=own, engine=engine)
            names = {family.name for family in own.collect()}
            for name in sorted(names & owners.keys()):
                raise PluginError(f"a metric {name!r} is there already, of {owners[name]}")
        except (Exception, SystemExit) as error:
            plugins.fail(impl, "register_metrics", error)
            continue
        owners |= dict.fromkeys(names, provenance.distribution)
        registry.register(_OfPlugin(provenance, own, frozenset(owners.keys() - names)))


class _OfPlugin(prometheus.registry.Collector):
    def __init__(
        self,
        provenance: Provenance,
        registry: prometheus.CollectorRegistry,
        others: frozenset[str],
    ) -> None:
        """others: names of others, which it may not use later either."""
        self._provenance = provenance
        self._registry = registry
        self._others = others
        self._has_logged = False

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        try:
            return [m for m in self._registry.collect() if m.name not in self._others]
        except Exception:
            if not self._has_logged:  # Log once: a server is scraped every few seconds.
                logger.exception("plugin %s failed in its metrics", self._provenance)
                self._has_logged = True
            return ()
