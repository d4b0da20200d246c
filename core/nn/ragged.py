"""Rows of different lengths, in groups with little padding, for attention in both directions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class Padded(NamedTuple):
    """Rows of similar lengths, padded to one tensor for one product."""

    tokens: torch.Tensor
    """[rows, longest] int64: index of each position's token; beyond a row's end, of its last."""
    visible: torch.Tensor | None
    """[rows, 1, 1, longest] bool: where there is a token; None if all rows are equally long."""
    place: torch.Tensor
    """[tokens of these rows] int64: index of each token in rows * longest."""
    source: torch.Tensor
    """[tokens of these rows] int64: index of that token in the step."""


PADDING_ALLOWED = 0.25
"""Largest share of padding in a padded product."""


class RaggedRows(NamedTuple):
    """One step's rows for attention in both directions, in groups with little padding."""

    groups: tuple[Padded, ...]

    @classmethod
    def of(cls, query_start: np.ndarray, device: torch.device) -> RaggedRows:
        """Group the rows, once per step for all layers. query_start: [num_rows + 1], on host."""
        starts = np.asarray(query_start[:-1], dtype=np.int64)
        lengths = np.diff(np.asarray(query_start, dtype=np.int64))
        order = np.argsort(-lengths, kind="stable")
        groups: list[Padded] = []
        first = 0
        while first < len(order):
            longest, end, tokens = int(lengths[order[first]]), first, 0
            while end < len(order):
                more = tokens + int(lengths[order[end]])
                if more < (1 - PADDING_ALLOWED) * longest * (end + 1 - first):
                    break
                tokens, end = more, end + 1
            rows = order[first:end]
            groups.append(_padded(starts[rows], lengths[rows], device))
            first = end
        return cls(tuple(groups))


def _padded(starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> Padded:
    longest = int(lengths.max())
    column = np.arange(longest)
    tokens = starts[:, None] + np.minimum(column, lengths[:, None] - 1)
    visible = column < lengths[:, None]
    place = np.flatnonzero(visible)

    def upload(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Padded(
        tokens=upload(tokens),
        visible=None if visible.all() else upload(visible)[:, None, None, :],
        place=upload(place),
        source=upload(tokens.reshape(-1)[place]),
    )
