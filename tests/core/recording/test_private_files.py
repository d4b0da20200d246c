"""Files with tenants' data are for their owner alone, whatever the umask and what was there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackfield.core.recording.private_files import (
    make_given_folder,
    make_private_folder,
    private_opener,
)


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_created_is_private(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "a" / "b")
    assert mode(tmp_path / "a" / "b") == 0o700
    make_given_folder(tmp_path / "given", "option")
    assert mode(tmp_path / "given") == 0o700
    with open(tmp_path / "file", "xb", opener=private_opener):
        pass
    assert mode(tmp_path / "file") == 0o600


def test_a_folder_of_our_own_is_tightened(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(mode=0o755)
    make_private_folder(tmp_path / "own")
    assert mode(tmp_path / "own") == 0o700


def test_a_folder_that_others_may_enter_stays_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "given").mkdir(mode=0o755)
    make_given_folder(tmp_path / "given", "batch_dir")
    assert mode(tmp_path / "given") == 0o755
    (record,) = caplog.records
    assert "batch_dir" in record.message and "755" in record.message
    caplog.clear()
    (tmp_path / "given").chmod(0o700)
    make_given_folder(tmp_path / "given", "batch_dir")
    assert not caplog.records
