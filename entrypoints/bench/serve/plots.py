"""Plots latency distributions and tokens over time, with matplotlib."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ....core.errors import ConfigError
from .load import RequestResult

BINS = 100


def plot_load(results: Sequence[RequestResult], folder: Path, title: str) -> Path:
    """Plot cumulative TTFT, TPOT and ITL, and tokens per second. Return the file's path.

    Raises ConfigError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib", param="plot") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = [each for each in results if each.error is None and each.times]
    curves = {
        "TTFT": [each.ttft for each in good],
        "TPOT": [tpot for each in good if (tpot := each.tpot) is not None],
        "ITL": [gap for each in good for gap in each.itl],
    }
    figure, (left_axes, right_axes) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name, values in curves.items():
        if values:
            shares = [(index + 1) / len(values) for index in range(len(values))]
            left_axes.step(
                [1e3 * value for value in sorted(values)], shares, where="post", label=name
            )
    left_axes.set(xlabel="ms", ylabel="share of requests or gaps", xscale="log", ylim=(0, 1))
    left_axes.grid(alpha=0.3)
    if left_axes.get_legend_handles_labels()[0]:
        left_axes.legend()
    begin = min((each.sent for each in good), default=0.0)
    pieces = [moment - begin for each in good for moment in each.times]
    if pieces:
        width = max(pieces) / BINS or 1.0
        weights = [1.0 / width] * len(pieces)
        right_axes.hist(pieces, bins=BINS, weights=weights, histtype="step")
    right_axes.set(xlabel="s", ylabel="pieces a second")
    right_axes.grid(alpha=0.3)
    figure.suptitle(title)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', title).strip('-')}.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
