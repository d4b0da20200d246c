"""`jackfield collect-env`: what it tells of a machine, and what it keeps to itself."""

from __future__ import annotations

import pytest
import torch

from jackfield import __version__
from jackfield.entrypoints.cli.collect_env import variables
from jackfield.entrypoints.cli.main import main


def test_a_report_names_versions_and_hides_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JACKFIELD_API_KEY", "s3cret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["collect-env"]) == 0
    out = capsys.readouterr().out
    titles = [line for line in out.splitlines() if not line.startswith(" ")]
    assert titles == [
        "jackfield:", "system:", "devices:", "packages:", "plugins:", "environment:",
    ]  # fmt: skip
    assert f"  version {__version__}\n" in out
    assert f"  torch {torch.__version__}\n" in out
    assert f"  jackfield {__version__}: traces\n" in out
    assert "  JACKFIELD_API_KEY=(set)\n" in out
    assert "s3cret" not in out


def test_only_variables_that_matter_are_shown_and_no_secret() -> None:
    shown = variables(
        {
            "AWS_REGION": "x",
            "HF_ENDPOINT": "https://ann:pass@mirror.example/hub",
            "HF_TOKEN": "hf_x",
            "HOME": "/home/ann",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_API_KEY": "x",
            "VLLM_LOGGING_LEVEL": "INFO",
        }
    )
    assert list(shown) == [
        "HF_ENDPOINT=https://(hidden)@mirror.example/hub",
        "HF_TOKEN=(set)",
        "OMP_NUM_THREADS=1",
        "TOKENIZERS_PARALLELISM=false",
        "VLLM_API_KEY=(set)",
        "VLLM_LOGGING_LEVEL=INFO",
    ]
