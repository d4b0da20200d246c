"""What is said of adapters: a card for each, and their counts for metrics."""

from __future__ import annotations

from ..lora_request import AdapterCard
from ..metrics.adapter_metrics import AdapterCounts
from ..scheduling.parts.adapters import Adapters
from .host_memory import Adapter, HostMemory


def adapter_card(adapter: Adapter, part: Adapters) -> AdapterCard:
    loaded, info = adapter.loaded, adapter.info
    number = 0 if loaded is None else loaded.number
    running = part.num_running(number)
    return AdapterCard(
        name=adapter.name,
        path=adapter.path,
        format=adapter.format,
        parent=adapter.parent,
        owner=adapter.owner,
        int_id=adapter.int_id,
        pinned=adapter.pinned,
        digest="" if info is None else info.digest,
        rank=0 if info is None else info.rank,
        nbytes=0 if loaded is None else loaded.info.nbytes,
        resident=part.is_resident(number),
        running=running,
        waiting=part.num_live(number) - running,
        notes=() if info is None else info.notes,
    )


def adapter_counts(
    part: Adapters, host: HostMemory, *, registered: int, num_waiting: int
) -> AdapterCounts:
    """registered: adapters by name; num_waiting: requests whose adapter is not in host memory."""
    everyones = [
        (loaded.number, loaded.adapter.name)
        for loaded in host
        if loaded.adapter is not None and not loaded.adapter.owner
    ]
    live = [(n, name) for n, name in everyones if part.num_live(n)]
    return AdapterCounts(
        registered=registered,
        loaded=len(host),
        resident=part.num_residents,
        host_bytes=sum(loaded.info.nbytes for loaded in host),
        requests_waiting=num_waiting + part.num_parked,
        reads=host.num_reads,
        read_seconds=host.read_seconds,
        **part.counts,
        running_names=tuple(name for n, name in live if part.num_running(n)),
        waiting_names=tuple(name for n, name in live if part.num_live(n) > part.num_running(n)),
    )
