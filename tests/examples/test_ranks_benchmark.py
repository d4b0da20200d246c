"""The table of several GPUs: its commands are ones that engines.py takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from programs import benchmark

import jackfield
from jackfield import EngineConfig
from jackfield.entrypoints.bench.engine.session import IN_PROCESS, make_parser
from jackfield.entrypoints.bench.workloads import ARCHITECTURES
from jackfield.entrypoints.flags.engine_flags import engine_options
from jackfield.examples.benchmarks.engines import PEERS

ROOT = Path(jackfield.__file__).resolve().parent


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark("ranks")


@pytest.mark.parametrize("gpus", [2, 4])
def test_cases_are_options_that_engines_take(script: Any, gpus: int) -> None:
    parser = make_parser("run", IN_PROCESS, ("W1",), PEERS)
    parser.add_argument("--engines", nargs="+")
    parser.add_argument("--budget-s", type=float)
    for case in script.cases(gpus):
        args = parser.parse_args(case.command(["jackfield"], None, 1.0)[4:])
        options = engine_options(args)
        assert options == args.peer_options == case.options
        config = EngineConfig(**options)
        assert config.num_ranks * config.data_parallel_size == (gpus if options else 1)
        assert args.model in ARCHITECTURES and args.workloads == list(case.workloads)


def test_it_names_tests_that_exist(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert all((ROOT / name).is_file() for name in (*script.TESTS, script.KITS[0]))
    assert script.main(["--print", "--engines", "jackfield", "--only", "stages"]) == 0
    printed = capsys.readouterr().out
    assert "-m gpu" in printed and "--pipeline-parallel-size=2" in printed
    assert "--data-parallel-size" not in printed
