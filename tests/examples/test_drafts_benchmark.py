"""The benchmark of drafts beside vLLM, at a size for a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jackfield.entrypoints.bench.workloads import ARCHITECTURES
from jackfield.examples.benchmarks import drafts

TINY = {
    "vocab_size": 900, "hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 4,
    "max_window_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


@pytest.mark.slow
def test_each_method_serves_the_text_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**ARCHITECTURES["Qwen3-0.6B"], **TINY}
    monkeypatch.setitem(drafts.ARCHITECTURES, "Qwen3-0.6B", config)
    output = tmp_path / "results.jsonl"
    options = {"device": "cpu", "num_gpu_blocks_override": 400, "block_size": 8}
    arguments = [
        "--model", "Qwen3-0.6B", "--dtype", "float32", "--output-tokens", "100", "--repeats", "1",
        "--rows", "2", "--methods", "none", "ngram", "suffix", "given", "eagle3",
        "--options", json.dumps(options), "--speculative", '{"adaptive_width": false}',
        "--output", str(output),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["drafts", *arguments])
    assert drafts.main() == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    steps = {(r["method"], r["at"]["text"]): r["measured"]["tokens_per_step"] for r in records}
    assert len(steps) == 3 * 3 + 2
    for text in drafts.TEXTS:
        assert steps["none", text] == 1.0
        assert steps["ngram", text] > 1.3 and steps["suffix", text] > 1.3
    # Those that are right with probability 0.7: 1 + 0.7 + 0.7 ** 2 and so on, at most.
    assert 1.8 < steps["given", "fill"] < 3.8
    assert abs(steps["eagle3", "fill"] - steps["given", "fill"]) < 0.4  # Other slots.
