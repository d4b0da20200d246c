"""Plots quality by the share of tokens that stays, with matplotlib."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ....core.errors import ConfigError
from ..report import Record
from .measure import WHOLE

PANELS = {"perplexity": "perplexity", "recall": "recall", "cosine_mean": "cosine, mean of layers"}


def plot_quality(records: Sequence[Record], folder: Path, title: str) -> Path:
    """Plot a curve per policy in each panel, and the layers' cosines at the smallest ratio. Return
    the file's path. Raises ConfigError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib", param="plot") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(18, 4.5), layout="constrained")
    whole = [each for each in records if each["policy"] == WHOLE]
    policies = dict.fromkeys(each["policy"] for each in records if each["policy"] != WHOLE)
    for panel, (field, label) in zip(axes, PANELS.items(), strict=False):
        for policy in policies:
            own = sorted((e["bytes"], e[field]) for e in records if e["policy"] == policy)
            panel.plot(*zip(*own, strict=True), marker="o", label=policy)
        for each in whole:
            panel.axhline(each[field], color="black", linewidth=0.8, linestyle="--")
        panel.set(xlabel="share of the context's bytes", ylabel=label)
        panel.grid(alpha=0.3)
    least = min((each["ratio"] for each in records if each["policy"] != WHOLE), default=1.0)
    for each in records:
        if each["policy"] != WHOLE and each["ratio"] == least:
            axes[3].plot(each["cosines"], marker=".", label=each["policy"])
    axes[3].set(xlabel="layer", ylabel=f"cosine at {least:g}")
    axes[3].grid(alpha=0.3)
    if policies:
        axes[3].legend()
    figure.suptitle(title)
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", title).strip("-")
    path = folder / f"kv-compression-{name}.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
