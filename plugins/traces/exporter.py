"""Chooses how spans are exported."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from ...core.errors import ConfigError
from .options import TracesOptions

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

PARAM = "plugin_options.traces"
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOLS = ("grpc", "http/protobuf")
GRPC_PORT = 4317


def span_exporter(options: TracesOptions) -> SpanExporter:
    """Return an exporter to the endpoint. Raises ConfigError for a bad URL or protocol, and without
    its package."""
    url = urlsplit(options.endpoint)
    try:
        fits = url.scheme in ("http", "https", "grpc") and bool(url.hostname) and url.port != 0
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError(
            f"{PARAM}.endpoint: must be a URL such as http://localhost:4318, got "
            f"{options.endpoint!r}",
            param=f"{PARAM}.endpoint",
        )
    protocol = _protocol(options)
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

            # A scheme of http is what makes it plain.
            return grpc.OTLPSpanExporter(endpoint=url._replace(scheme=_grpc_scheme(url)).geturl())
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

        path = url.path if url.path.strip("/") else "/v1/traces"
        return http.OTLPSpanExporter(endpoint=url._replace(path=path).geturl())
    except ImportError as error:
        raise ConfigError(
            f"{PARAM}.endpoint: traces over {protocol} need packages that are not installed "
            f"({error.name}); install jackfield[traces]",
            param=f"{PARAM}.endpoint",
        ) from error


def _grpc_scheme(url: SplitResult) -> str:
    return "https" if url.scheme == "https" else "http"


def _protocol(options: TracesOptions) -> str:
    if options.protocol != "auto":
        return options.protocol
    for name in VARIABLES:
        if protocol := os.environ.get(name):
            if protocol not in PROTOCOLS:
                raise ConfigError(
                    f"{name}: {protocol!r} is not one of {', '.join(PROTOCOLS)}",
                    param=f"{PARAM}.protocol",
                )
            return protocol
    url = urlsplit(options.endpoint)
    return "grpc" if url.scheme == "grpc" or url.port == GRPC_PORT else "http/protobuf"
