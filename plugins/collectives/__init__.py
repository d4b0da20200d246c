"""Collectives that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_collectives(registry: Any) -> None:
    registry.add("peer_memory", "jackfield.plugins.collectives.peer_memory:PeerMemory", priority=20)
    registry.add("nccl", "jackfield.plugins.collectives.builtin:Nccl", priority=10)
    registry.add("gloo", "jackfield.plugins.collectives.builtin:Gloo")


@hookimpl
def register_all2all_backends(registry: Any) -> None:
    registry.add("all_to_all", "jackfield.plugins.collectives.all_to_all:AllToAll")
