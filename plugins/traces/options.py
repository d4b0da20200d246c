"""Options of traces."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class TracesOptions(msgspec.Struct, frozen=True):
    endpoint: Annotated[
        str,
        Meta(
            description="URL of an OTLP collector, which gets a trace of each request: "
            "http://HOST:4318, or http://HOST:4317 for gRPC; empty: no traces"
        ),
    ] = ""
    protocol: Annotated[
        Literal["auto", "grpc", "http/protobuf"],
        Meta(
            description="auto: OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_EXPORTER_OTLP_PROTOCOL, "
            "else gRPC for port 4317 and HTTP for others"
        ),
    ] = "auto"
