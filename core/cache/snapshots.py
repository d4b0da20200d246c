"""Snapshots of states at block boundaries, in a bounded number of rows."""

from __future__ import annotations

from collections import OrderedDict


class StateSnapshots:
    """LRU rows by the hash of their prefix's last block.

    A step loads before its rows and saves after them, so saves are found from the next plan on
    (`commit`), and a row may be loaded and replaced in one plan.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._rows: OrderedDict[bytes, int] = OrderedDict()
        """Hash → row, in LRU order."""
        self._saved: dict[bytes, int] = {}
        """Saves of the current plan."""
        self._free = list(range(num_rows))[::-1]

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._rows

    def use(self, block_hash: bytes) -> int:
        """Return the row of a present prefix."""
        self._rows.move_to_end(block_hash)
        return self._rows[block_hash]

    def save(self, block_hash: bytes) -> int | None:
        """Return a row for a new prefix; None if it has one, or no row is left in this plan."""
        if block_hash in self._rows:
            self._rows.move_to_end(block_hash)
            return None
        if block_hash in self._saved:
            return None
        if not self._free:
            if not self._rows:
                return None
            _, row = self._rows.popitem(last=False)
            self._free.append(row)
        row = self._saved[block_hash] = self._free.pop()
        return row

    def commit(self) -> None:
        self._rows.update(self._saved)
        self._saved.clear()

    def forget(self, block_hash: bytes) -> None:
        for rows in (self._rows, self._saved):
            if (row := rows.pop(block_hash, None)) is not None:
                self._free.append(row)

    def forget_all(self) -> None:
        self._rows.clear()
        self._saved.clear()
        self._free = list(range(self.num_rows))[::-1]
