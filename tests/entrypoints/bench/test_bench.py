"""The benchmarks really run, small, on the embedded model."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from jackfield.entrypoints.bench import report
from jackfield.entrypoints.bench.command import run
from jackfield.entrypoints.bench.family_shapes import FAMILY_SHAPES
from jackfield.entrypoints.bench.roofline import (
    Ceilings,
    Extent,
    ModelShape,
    batch_floor,
    decode_step_floor,
)
from jackfield.entrypoints.bench.workloads import (
    ARCHITECTURES,
    WORKLOADS,
    draw,
    model_config_dict,
    write_model,
)


def test_every_workload_in_process_gives_a_line(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    status = run(
        ["run", "W1", "decode", "W2", "mix", "W3", "long-prompts", "W4", "W7", "--scale",
         "0.01", "--batch-sizes", "1", "3", "--repeats", "1", "--device", "cpu",
         "--attention-backend", "torch",
         "--output", str(out)]
    )  # fmt: skip
    assert status == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    kinds = [line["workload"] for line in lines]
    assert kinds == [
        "start", "W1", "decode", "decode", "W2", "mix", "W3", "long-prompts", "W4", "W7",
    ]  # fmt: skip
    for line in lines:
        assert line["date"] and line["commit"] and line["device"] and line["torch"]
        assert line["engine"] == "jackfield" and line["model"] == "embedded"
        # Steps of these are the difference of two times, which noise decides on this scale.
        if line["workload"] not in ("W1", "decode", "W4"):
            assert all(value > 0 for value in line["measured"].values())
        if line["workload"] not in ("start",):
            headline = WORKLOADS[line["workload"]].headline
            assert headline in line["measured"] and line["floor"]
    assert lines[-1]["measured"]["prefix_hit_rate"] > 0.3, "chats share their beginnings"


def test_made_up_weights_run_without_a_tokenizer(tmp_path: Path) -> None:
    """A checkpoint that is a config.json alone."""
    folder = write_model("Qwen3-0.6B", tmp_path)
    config = model_config_dict(folder)
    config.update(
        hidden_size=32, num_hidden_layers=2, intermediate_size=48, vocab_size=300, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    out = tmp_path / "results.jsonl"
    status = run(
        ["latency", "W1", "--model", str(folder), "--load-format", "dummy", "--scale", "0.05",
         "--skip-tokenizer-init", "--repeats", "1", "--ceilings", "none", "--device", "cpu",
         "--attention-backend", "torch", "--output", str(out)]
    )  # fmt: skip
    assert status == 0
    assert json.loads(out.read_text().splitlines()[-1])["measured"]["ms_per_token"] > 0


def test_quantized_engines_have_no_floor_of_the_plain_type(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    ceilings = json.dumps({
        "copy_bytes_per_second": 1e10, "read_bytes_per_second": 1e10, "matmul_flops": 1e11,
        "dtype": "float32", "device": "cpu",
    })  # fmt: skip
    status = run(
        ["latency", "W1", "--scale", "0.02", "--repeats", "1", "--device", "cpu",
         "--attention-backend", "torch", "--quantization", "rtn", "--ceilings", ceilings,
         "--output", str(out)]
    )  # fmt: skip
    assert status == 0
    last = json.loads(out.read_text().splitlines()[-1])
    assert "ms_per_token" in last["measured"] and last["options"]["quantization"] == "rtn"
    assert "floor" not in last and "share_of_floor" not in last["measured"]


@pytest.mark.slow
def test_startup_is_timed_in_fresh_processes(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    options = ["--device", "cpu", "--attention-backend", "torch", "--output", str(out)]
    assert run(["startup", *options]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["at"]["caches"] for line in lines] == ["cold", "warm"]
    for line in lines:
        assert line["workload"] == "W6" and line["engine"] == "jackfield"
        # The interpreter and torch alone take some of it.
        assert 0.5 < line["measured"]["ready_s"] < line["measured"]["first_token_s"] < 120


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_are_timed_beside_their_floors(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    names = [
        "rms_norm", "silu_mul", "gelu_mul", "decode_inputs", "sample_gumbel", "quantize_rows",
        "delta_rule", "selective_scan", "ssd_scan", "delta_net_step", "mamba2_step",
        "index_inputs", "index_scores", "index_choice", "attend_prefix",
    ]  # fmt: skip
    options = ["--device", "cpu", "--repeats", "1", "--output", str(out)]
    assert run(["kernels", *names, *options]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["workload"] for line in lines} == set(names) and len(lines) == 40
    for line in lines:
        assert line["measured"]["us"] > line["floor"]["us"] > 0
    assert run(["kernels", "no_such_kernel", *options]) != 0
    assert run(["kernels", "paged_attention_decode", *options]) == 0
    shapes = [json.loads(line)["at"]["shape"] for line in out.read_text().splitlines()[40:]]
    formats = [shape.partition(", ")[2] for shape in shapes if ", " in shape]
    assert formats == ["float32", "fp8", "int8", "int8_int4", "int4"]


def test_mistakes_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["latencies"]) == 2
    assert "no such benchmark: latencies" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(["latency", "W9"])
    assert "W9" in capsys.readouterr().err
    assert run(["latency", "W1", "--device", "cpu", "--ceilings", "{}"]) == 2
    assert "--ceilings: Object missing required field" in capsys.readouterr().err


def test_w2_draws_the_lengths_that_others_publish() -> None:
    """142,827 prompt and 133,966 output tokens, as nano-vllm's benchmark draws them."""
    asks = draw(WORKLOADS["W2"], 151936, 0)
    assert sum(len(request.prompt) for request in asks) == 142_827
    assert sum(request.output for request in asks) == 133_966
    again = draw(WORKLOADS["W2"], 151936, 1)
    assert [len(a.prompt) for a in again] == [len(a.prompt) for a in asks]
    assert all(a.prompt[:16] != b.prompt[:16] for a, b in zip(asks, again, strict=True))


def test_the_floor_of_8b_is_its_bytes(tmp_path: Path) -> None:
    """15.1 GB of weights at 4.2 TB/s: 3.60 ms per token."""
    assert set(ARCHITECTURES) == {
        "Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B", "Qwen2.5-7B", "Gemma-2-9B",
        "Gemma-3-27B",
        "DeepSeek-V2-Lite", "Mamba2-2.7B", "Falcon-H1-1.5B", "Qwen3-Next-12L", "GPT-OSS-20B",
        *FAMILY_SHAPES,
    }  # fmt: skip
    shape = ModelShape.from_config(model_config_dict(write_model("Qwen3-8B", tmp_path)))
    assert shape.step_weight_bytes(1) == pytest.approx(15.1e9, rel=0.01)
    assert shape.kv_bytes_per_token == 147_456
    card = Ceilings(
        copy_bytes_per_second=4.2e12, read_bytes_per_second=4.2e12, matmul_flops=780e12,
        dtype="bfloat16", device="a card",
    )  # fmt: skip
    first = batch_floor(shape, card, [Extent(1, 3, 0)])
    assert first == pytest.approx(3 * 3.6e-3, rel=0.01)


def test_the_floor_of_a_mixture_in_4_bits(tmp_path: Path) -> None:
    """GPT-OSS-20B by hand: 24 layers of 4 of 32 experts, of 3 * 2880 * 2880 numbers in 4.25 bits
    each; attention of 64 and 8 heads of 64, a router and the head in bfloat16. Of 1,000 cached
    tokens, half of the layers read 128."""
    shape = ModelShape.from_config(model_config_dict(write_model("GPT-OSS-20B", tmp_path)))
    attention = 2880 * 64 * (2 * 64 + 2 * 8)
    wide = 2 * (24 * (attention + 2880 * 32) + 201088 * 2880)
    assert shape.step_weight_bytes(1) == pytest.approx(24 * 12 * 2880**2 * 17 / 32 + wide)
    layer = 2 * 8 * 64 * 2
    assert shape.read_kv_bytes(1, 1000) == pytest.approx(12 * layer * (1000 + 128))
    assert shape.read_kv_bytes(2, 200) == pytest.approx(24 * layer * 200)


@pytest.mark.parametrize(
    ("model", "state"),
    [("Mamba2-2.7B", 83.9e6), ("Falcon-H1-1.5B", 37.7e6), ("Qwen3-Next-12L", 9.4e6)],
)
def test_the_floor_of_models_with_states(model: str, state: float, tmp_path: Path) -> None:
    """All weights but the embedding's and small ones, as `transformers` counts them; a sequence's
    states in two bytes a number, which are read and written."""
    folder = write_model(model, tmp_path)
    shape = ModelShape.from_config(model_config_dict(folder))
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    count = sum(p.numel() for p in whole.parameters())
    count -= 0 if whole.config.tie_word_embeddings else shape.head_weights
    read_weights = shape.step_weight_bytes(1e9) / shape.weight_bytes
    assert read_weights == pytest.approx(count, rel=0.01)
    assert shape.state_bytes == pytest.approx(state, rel=0.01)
    card = Ceilings(
        copy_bytes_per_second=1.0, read_bytes_per_second=1.0, matmul_flops=1e30,
        dtype="bfloat16", device="a card",
    )  # fmt: skip
    more = decode_step_floor(shape, card, 64, 0) - shape.step_weight_bytes(64)
    assert more == pytest.approx(128 * state, rel=0.01)


BILLIONS = {
    "Apertus-8B": 7.52, "Arcee-4.5B": 4.29, "BLOOM-7B1": 7.07, "Baichuan2-7B": 6.99,
    "Command-R7B": 8.03, "EXAONE-3.5-7.8B": 7.40, "EXAONE-4.0-32B-16L": 8.26, "Falcon-7B": 6.92,
    "GPT-2-XL": 1.56, "GPT-J-6B": 5.84, "Hunyuan-7B": 7.50, "InternLM2.5-7B": 7.36,
    "Llama-3.1-8B": 7.50, "MPT-7B": 6.65, "MiniCPM-2B": 2.72, "Nemotron-Mini-4B": 3.40,
    "OPT-6.7B": 6.65, "Persimmon-8B": 8.32, "Pythia-6.9B": 6.65, "SmolLM3-3B": 3.08,
    "StarCoder2-7B": 7.17,
}  # fmt: skip
"""Weights that a token is multiplied with: what the checkpoints' pages count, less embeddings that
are only looked up."""


def test_the_floors_of_families_are_their_weights() -> None:
    floors = {
        name: ModelShape.from_config(config).step_weight_bytes(1) / 2e9
        for name, config in FAMILY_SHAPES.items()
    }
    assert floors == pytest.approx(BILLIONS, abs=0.01)


def test_the_floor_of_a_mixture_with_latents(tmp_path: Path) -> None:
    """Of 15.7 billion weights, 2.45 per token are multiplied with, and the embedding is not."""
    shape = ModelShape.from_config(model_config_dict(write_model("DeepSeek-V2-Lite", tmp_path)))
    assert shape.active_weights + shape.head_weights == pytest.approx(2.45e9, rel=0.01)
    assert shape.step_weight_bytes(1e9) == pytest.approx(2 * 15.5e9, rel=0.01)
    assert shape.kv_bytes_per_token == 27 * 576 * 2
    assert shape.attention_flops(1) == 2 * 27 * 16 * (192 + 128)


def test_a_copy_names_the_commit_that_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JACKFIELD_COMMIT", raising=False)
    own = report.commit()
    monkeypatch.setenv("JACKFIELD_COMMIT", "0123abcd")
    assert report.commit() == "0123abcd" != own
    monkeypatch.delenv("JACKFIELD_COMMIT")
    monkeypatch.setattr(report, "ROOT", Path("/nowhere"))
    assert report.commit() == "unknown"
