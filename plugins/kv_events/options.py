"""Options of KV events. Names are vLLM's."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PARAM = "plugin_options.kv_events"


class KVEventsOptions(msgspec.Struct, frozen=True):
    enable_kv_cache_events: Annotated[
        bool, Meta(description="publish which blocks prefix hits find")
    ] = False
    publisher: Annotated[Literal["zmq", "null"], Meta(description="null: publish nothing")] = "zmq"
    endpoint: Annotated[
        str,
        Meta(
            description="ZeroMQ address of the PUB socket: tcp://*:PORT or ipc://PATH is bound, "
            "tcp://HOST:PORT of a collector is connected to; empty: port 5557 of this host's "
            "loopback is bound. With data_parallel_size, each engine adds its number to the port"
        ),
    ] = ""
    replay_endpoint: Annotated[
        str | None,
        Meta(description="address of a ROUTER socket to bind, which repeats what was missed"),
    ] = None
    buffer_steps: Annotated[
        int, Meta(description="batches kept for that, and at most 64 MiB of them", ge=1)
    ] = 10_000
    hwm: Annotated[
        int,
        Meta(description="batches that wait for a slow subscriber; further ones it loses", ge=1),
    ] = 10_000
    topic: Annotated[str, Meta(description="topic of each batch, to which readers subscribe")] = ""
    int_block_hashes: Annotated[
        bool,
        Meta(description="hashes as integers, their last 64 bits; false: all of their 32 bytes"),
    ] = True
