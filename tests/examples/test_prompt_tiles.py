"""The table of prompt attention by tiles, with the backend's own choice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from programs import benchmark

pytest.importorskip("triton")

from jackfield.kernels.attention.paged_attention_prefill import PrefillConfig


def test_each_tile_is_timed_and_those_without_room_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = benchmark("prompt_tiles")
    # Tiles have powers of two rows.
    tiles = (PrefillConfig(16, 16, 4, 2), PrefillConfig(24, 16, 4, 2))
    monkeypatch.setattr(script, "TILES", tiles)
    output = tmp_path / "lines.jsonl"
    argv = ["prompt_tiles.py", "--sizes", "tiny", "--device", "cpu", "--shapes", "2x20"]
    monkeypatch.setattr(sys, "argv", [*argv, "--output", str(output)])
    script.main()
    small, refused, chosen = (json.loads(line) for line in output.read_text().splitlines())
    assert [each["at"]["block_m"] for each in (small, refused, chosen)] == [16, 24, 32]
    assert [each["at"]["chosen"] for each in (small, refused, chosen)] == [False, False, True]
    assert small["measured"]["us"] > 0 and chosen["measured"]["us"] > 0
    assert "measured" not in refused and refused["error"]
    assert "tflops" in capsys.readouterr().out
