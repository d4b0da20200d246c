"""What may make a GPU slower than it was: other processes, its clock, and what holds that down.

Read from its driver's `nvidia-smi`, so that this process has no context on it.
"""

from __future__ import annotations

import os
import subprocess

from .report import Record

REASONS = (
    "idle", "applications clocks", "power cap", "hardware slowdown", "sync boost",
    "thermal slowdown (software)", "thermal slowdown (hardware)", "power brake", "display clock",
)  # fmt: skip
"""Of the driver's mask, from its lowest bit."""
NUMBERS = {
    "clocks.current.sm": "sm_clock_mhz", "power.draw": "power_w",
    "temperature.gpu": "temperature_c",
}  # fmt: skip
COUNTERS = {
    "sw_power_cap": "power cap", "hw_power_brake_slowdown": "power brake",
    "sw_thermal_slowdown": "thermal slowdown (software)",
    "hw_thermal_slowdown": "thermal slowdown (hardware)",
}  # fmt: skip
"""Of times, in microseconds; not every driver has them."""


def gpu_state() -> Record:
    """Return the state now of the first GPU that is visible; empty if there is none, and without
    what its driver does not tell.

    `processes`: (pid, MiB) of those with a context, our own included; pids may be another
    namespace's. `throttled_s`: seconds since the driver was loaded.
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
    """Return for how many seconds between two states each reason held the clock down; empty if
    the driver does not count them."""
    first, last = before.get("throttled_s", {}), after.get("throttled_s", {})
    return {name: round(last[name] - first[name], 3) for name in first.keys() & last.keys()}


def _query(fields: list[str]) -> list[str]:
    """One row of values; empty if the driver does not know a field."""
    rows = _smi(f"--query-gpu={','.join(fields)}")
    return rows[0] if rows else []


def _number(values: list[str] | str) -> float | int | None:
    text = values if isinstance(values, str) else values[0] if values else ""
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        return None


def _smi(query: str) -> list[list[str]] | None:
    """Return rows of values without units; None if that failed."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits", f"--id={device or 0}"],
            capture_output=True, text=True, check=True, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
