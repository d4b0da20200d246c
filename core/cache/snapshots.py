"""Snapshots of states at block boundaries: which prefix each of a bounded number of rows holds."""

from __future__ import annotations

from collections import OrderedDict


class StateSnapshots:
    """Rows by the hash of the last block of their prefix; the one used longest ago is replaced.

    A step saves after its rows, and loads before them. So what a plan saves can be found from the
    next plan on (`commit`), and a row may be loaded and replaced in the same plan.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._rows: OrderedDict[bytes, int] = OrderedDict()
        """Hash → row, the one used longest ago first."""
        self._saved: dict[bytes, int] = {}
        """Those that the plan under construction saves."""
        self._free = list(range(num_rows))[::-1]

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._rows

    def use(self, block_hash: bytes) -> int:
        """Return the row of a prefix that is there, to be loaded."""
        self._rows.move_to_end(block_hash)
        return self._rows[block_hash]

    def save(self, block_hash: bytes) -> int | None:
        """Return a row for a prefix; None if it has one, or this plan has taken all rows."""
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
        """Let later plans find what this one saves."""
        self._rows.update(self._saved)
        self._saved.clear()

    def forget(self, block_hash: bytes) -> None:
        """Remove a prefix, if it is there."""
        for rows in (self._rows, self._saved):
            if (row := rows.pop(block_hash, None)) is not None:
                self._free.append(row)

    def forget_all(self) -> None:
        """Remove all prefixes."""
        self._rows.clear()
        self._saved.clear()
        self._free = list(range(self.num_rows))[::-1]
