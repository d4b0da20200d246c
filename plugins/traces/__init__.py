"""OpenTelemetry traces of requests, off without an endpoint."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl
from .options import TracesOptions


@hookimpl
def register_options(registry: Any) -> None:
    registry.add("traces", "jackfield.plugins.traces.options:TracesOptions")


@hookimpl
def options_ready(options: TracesOptions) -> object:
    """Return the hooks that trace. Raises ConfigError without the packages that they need."""
    if not options.endpoint:
        return None
    from .exporter import span_exporter
    from .request_traces import RequestTraces

    return RequestTraces(span_exporter(options))
