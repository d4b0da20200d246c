"""docs/reference/metrics.md: what GET /metrics has."""

from __future__ import annotations

import ast
import inspect

from markdown_table import table

from jackfield.core import outputs, protocols
from jackfield.core.data_parallel.metrics import PoolMetrics
from jackfield.core.engine import core as engine_core
from jackfield.core.metrics.adapter_metrics import AdapterCounts, AdapterMetrics
from jackfield.core.metrics.metrics import EngineMetrics
from jackfield.core.metrics.rank_metrics import RankMetrics
from jackfield.entrypoints.server.frontend_metrics import FrontendMetrics
from jackfield.entrypoints.server.http_metrics import HttpMetrics


def metrics() -> str:
    """What GET /metrics tells."""
    engine_metrics = EngineMetrics("MODEL")
    engine_metrics.observe_stats(
        outputs.EngineStats(
            spec_decode_num_accepted_tokens_per_pos={0: 1}, requests_finished={"stop": 1},
            part_counts={"NAME": 1},
        )
    )  # fmt: skip
    engine_metrics.observe_cache_config(**dict.fromkeys(_cache_facts(), ""))
    engine_metrics.registry.register(FrontendMetrics(0, lambda: 0))
    http_metrics = HttpMetrics()
    http_metrics.count("ROUTE", "GET", 200, 0.0)
    engine_metrics.registry.register(http_metrics)
    engine_metrics.registry.register(
        RankMetrics("MODEL", lambda: [protocols.RankState(0, "HOST", 0, 0, 0)])
    )
    engine_metrics.registry.register(AdapterMetrics("MODEL", 1, AdapterCounts))
    rows = []
    for family in [*engine_metrics.registry.collect(), *PoolMetrics("MODEL", 1).registry.collect()]:
        labels = sorted({k for s in family.samples for k in s.labels} - {"le"})
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.append([f"`{name}`", family.type, ", ".join(labels), family.documentation])
    return (
        "# Metrics\n\n"
        "What the server counts and measures. "
        "`GET /metrics` answers in Prometheus' text format, without an API key. Where the meaning "
        "is the same, a name is vLLM's with the prefix `jackfield:`. Every engine has a registry "
        "of its own. Times are seconds. In Python, `engine.stats()` gives the same counts as "
        "an `EngineStats` (`core/step.py`). Those of front ends are there with "
        "`--api-server-count` alone, those of ranks where an engine has several, those of "
        "adapters (`lora_…`) with `--enable-lora`, those of "
        "`data_parallel` with `--data-parallel-size` alone; there, each engine's metrics have "
        "the label `engine`, its number.\n\n"
        "Source: [core/metrics/metrics.py](../../core/metrics/metrics.py), "
        "[core/metrics/rank_metrics.py](../../core/metrics/rank_metrics.py), "
        "[core/metrics/adapter_metrics.py](../../core/metrics/adapter_metrics.py), "
        "[core/data_parallel/metrics.py](../../core/data_parallel/metrics.py), "
        "[entrypoints/server/frontend_metrics.py](../../entrypoints/server/frontend_metrics.py).\n\n"
        + table(["name", "type", "labels", "meaning"], sorted(rows))
    )


def _cache_facts() -> list[str]:
    """Labels of cache_config_info, as the engine gives them."""
    for node in ast.walk(ast.parse(inspect.getsource(engine_core))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "observe_cache_config":
                return [keyword.arg for keyword in node.keywords if keyword.arg]
    raise SystemExit("core/engine/core.py does not call observe_cache_config any more")
