"""Reads conditions that slow a GPU: other processes, its clock, and the clock's limits.

Uses `nvidia-smi`, so that this process has no context on it.
"""

from __future__ import annotations

import os
import subprocess

from .report import Record

REASONS = (
    "idle", "applications clocks", "power cap", "hardware slowdown", "sync boost",
    "thermal slowdown (software)", "thermal slowdown (hardware)", "power brake", "display clock",
)  # fmt: skip
"""Bits of the driver's mask, from the lowest."""
NUMBERS = {
    "clocks.current.sm": "sm_clock_mhz", "power.draw": "power_w",
    "temperature.gpu": "temperature_c",
}  # fmt: skip
COUNTERS = {
    "sw_power_cap": "power cap", "hw_power_brake_slowdown": "power brake",
    "sw_thermal_slowdown": "thermal slowdown (software)",
    "hw_thermal_slowdown": "thermal slowdown (hardware)",
}  # fmt: skip
"""Counters in microseconds; not every driver has them."""


def gpu_state() -> Record:
    """Return the first visible GPU's state as far as its driver reports it; empty without one.

    `processes`: (pid, MiB) with a context, our own included; pids may be of another namespace.
    `throttled_s`: since the driver was loaded.
    """
    state: Record = {}
    for field, name in NUMBERS.items():
        if (number := _number(_query([field]))) is not None:
            state[name] = number
    for kind in ("event", "throttle"):
        mask = _query([f"clocks_{kind}_reasons.active"])
        if mask and mask[0].startswith("0x"):
            bits = int(mask[0], 16)
            state["throttled_by"] = [name for i, name in enumerate(REASONS) if bits >> i & 1]
            break
    times = _query([f"clocks_event_reasons_counters.{name}" for name in COUNTERS])
    if times and all(time.isdigit() for time in times):
        state["throttled_s"] = {
            name: int(time) / 1e6 for name, time in zip(COUNTERS.values(), times, strict=True)
        }
    processes = _smi("--query-compute-apps=pid,used_memory")
    if processes is not None:
        state["processes"] = [list(map(_number, row)) for row in processes]
    return state


def throttled(before: Record, after: Record) -> dict[str, float]:
    """Return the seconds that each reason held the clock down between two states; empty if
    uncounted.
    """
    first, last = before.get("throttled_s", {}), after.get("throttled_s", {})
    return {name: round(last[name] - first[name], 3) for name in first.keys() & last.keys()}


def _query(fields: list[str]) -> list[str]:
    """Return one row of values; empty if the driver lacks a field."""
    rows = _smi(f"--query-gpu={','.join(fields)}")
    return rows[0] if rows else []


def _number(values: list[str] | str) -> float | int | None:
    text = values if isinstance(values, str) else values[0] if values else ""
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        return None


def _smi(query: str) -> list[list[str]] | None:
    """Return rows of values without units; None on failure."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits", f"--id={device or 0}"],
            capture_output=True, text=True, check=True, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
