"""Where Triton is not installed, its operations say so, and others serve."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules["triton"] = None
import torch
from jackfield import LLM, SamplingParams
from jackfield.plugins.operations.triton import TritonOperations
print(TritonOperations.supports(torch.device("cpu"), torch.float32))
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
for more in {}, {"speculative_config": NGRAM}, {"kv_compression": "key_norm"}:
    with LLM(device="cpu", operations=sys.argv[1], **more) as llm:
        outputs = llm.generate(["3 and 4"], SamplingParams(max_tokens=3, ignore_eos=True))
        print(len(outputs[0].outputs[0].token_ids))
"""


@pytest.mark.parametrize("operations", ["auto", "triton"])
def test_a_refusal_names_what_is_missing(operations: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, operations], env=environment, capture_output=True, text=True
    )
    assert "triton cannot be imported" in done.stdout.splitlines()[0]
    if operations == "auto":
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-3:] == ["3"] * 3
    else:
        assert "ConfigError: operations: 'triton' cannot serve this model here" in done.stderr
        assert "triton cannot be imported" in done.stderr.splitlines()[-1]
