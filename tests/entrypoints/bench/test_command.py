"""`jackfield bench`: every benchmark that is listed can be started."""

from __future__ import annotations

import pytest

from jackfield.entrypoints.bench.command import BENCHMARKS, run


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run([name, "--help"])
    assert end.value.code == 0 and "usage" in capsys.readouterr().out
