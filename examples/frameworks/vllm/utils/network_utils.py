"""Addresses of this machine."""

from __future__ import annotations

import os
import socket


def get_ip() -> str:
    """Return the address by which others reach this machine: `VLLM_HOST_IP`, or the one that leads
    outside, or the loopback."""
    if address := os.environ.get("VLLM_HOST_IP"):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Sends nothing: it chooses a route.
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def get_open_port() -> int:
    """Return a port that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
