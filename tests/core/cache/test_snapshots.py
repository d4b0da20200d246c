"""Snapshots of states: which prefix each row holds."""

from __future__ import annotations

from jackfield.core.cache.snapshots import StateSnapshots


def saved(snapshots: StateSnapshots, *names: bytes) -> list[int | None]:
    rows = [snapshots.save(name) for name in names]
    snapshots.commit()
    return rows


def test_what_a_plan_saves_is_found_from_the_next_plan_on() -> None:
    snapshots = StateSnapshots(2)
    row = snapshots.save(b"a")
    assert b"a" not in snapshots
    snapshots.commit()
    assert b"a" in snapshots
    assert snapshots.use(b"a") == row


def test_the_prefix_used_longest_ago_is_replaced() -> None:
    snapshots = StateSnapshots(2)
    first, second = saved(snapshots, b"a", b"b")
    assert {first, second} == {0, 1}
    snapshots.use(b"a")
    assert saved(snapshots, b"c") == [second]
    assert b"b" not in snapshots
    assert snapshots.use(b"a") == first


def test_a_prefix_is_saved_once() -> None:
    snapshots = StateSnapshots(2)
    assert saved(snapshots, b"a", b"a")[1] is None
    assert saved(snapshots, b"a") == [None]


def test_a_plan_with_more_prefixes_than_rows_saves_the_first() -> None:
    snapshots = StateSnapshots(1)
    assert saved(snapshots, b"a", b"b") == [0, None]
    assert b"b" not in snapshots


def test_forgotten_rows_are_used_again() -> None:
    snapshots = StateSnapshots(2)
    saved(snapshots, b"a", b"b")
    snapshots.forget(b"a")
    snapshots.forget(b"nothing")
    assert b"a" not in snapshots and b"b" in snapshots
    saved(snapshots, b"c")
    assert b"b" in snapshots
    snapshots.forget_all()
    assert b"b" not in snapshots
    assert None not in saved(snapshots, b"d", b"e")
