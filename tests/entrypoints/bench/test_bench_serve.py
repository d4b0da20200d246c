"""`jackfield bench serve` against a real server of the embedded model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest

from jackfield.entrypoints.bench.command import run
from jackfield.entrypoints.bench.process_tree import descendants
from jackfield.entrypoints.bench.serve import servers
from jackfield.entrypoints.bench.serve.serve_options import (
    chosen_workloads,
    draw_chats,
    make_parser,
    parse,
    ways,
)
from jackfield.entrypoints.bench.serve.servers import (
    SERVED,
    free_port,
    server_command,
    serving,
)
from jackfield.entrypoints.bench.workloads import WORKLOADS

CPU = ["--device", "cpu", "--attention-backend", "torch"]


@pytest.fixture(scope="module", autouse=True)
def forked_processes() -> Iterator[None]:
    """Servers, and clients beside the first."""
    with forked.processes_of(servers, asyncio.unix_events):
        yield


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    command = server_command("jackfield", "", dummy=False, port=port, max_model_len=512, flags=CPU)
    server = serving(command, port, timeout=300)
    with asyncio.Runner() as runner:
        yield runner.run(server.__aenter__()).url
        runner.run(server.__aexit__(None, None, None))


def bench(
    url: str, folder: Path, *options: str, status: int = 0, warmups: int = 0
) -> list[dict[str, Any]]:
    """→ the lines it wrote"""
    out = folder / "results.jsonl"
    arguments = [
        "--base-url",
        url,
        "--vocab-size",
        "1500",
        "--output",
        str(out),
        "--num-warmups",
        str(warmups),
    ]
    assert run(["serve", *options, *arguments]) == status
    return [json.loads(line) for line in out.read_text().splitlines()]


def by_hand(values: list[float], percent: float) -> float:
    """Linear between the two nearest of the sorted values."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(percent) - 1]


@pytest.mark.parametrize("processes", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_percentiles_are_those_of_the_requests(url: str, tmp_path: Path, processes: str) -> None:
    (line,) = bench(
        url, tmp_path, "--num-prompts", "12", "--max-concurrency", "4", "--random-input-len", "20",
        "40", "--random-output-len", "3", "9", "--percentile-metrics", "ttft,tpot,itl,e2el",
        "--metric-percentiles", "50,90,99", "--save-detailed", "--result-dir", str(tmp_path),
        "--result-filename", "one.json", "--client-processes", processes,
    )  # fmt: skip
    assert line["at"] == {"max_concurrency": 4, "requests": 12} and line["failed"] == 0
    assert line["engine"] == "server" and line["model"] == SERVED and line["url"] == url
    measured, result = line["measured"], json.loads((tmp_path / "one.json").read_text())
    assert result["completed"] == 12 and result["errors"] == [""] * 12
    lengths = result["input_lens"], result["output_lens"]
    for actual, (low, high) in zip(lengths, ((20, 40), (3, 9)), strict=True):
        assert low <= min(actual) < max(actual) <= high
    ttfts, itls, output = result["ttfts"], result["itls"], result["output_lens"]
    e2els = [first + sum(gaps) for first, gaps in zip(ttfts, itls, strict=True)]
    tpots = [sum(gaps) / (count - 1) for gaps, count in zip(itls, output, strict=True) if gaps]
    gaps = [gap for itl in itls for gap in itl]
    for name, values in (("ttft", ttfts), ("tpot", tpots), ("itl", gaps), ("e2el", e2els)):
        assert min(values) >= 0
        for percent in (50, 90, 99):
            expected = 1e3 * by_hand(values, percent)
            assert measured[f"{name}_p{percent}_ms"] == pytest.approx(expected, rel=1e-4)
            assert result[f"p{percent}_{name}_ms"] == pytest.approx(expected, rel=1e-4)
        assert measured[f"{name}_mean_ms"] == pytest.approx(
            1e3 * statistics.fmean(values), rel=1e-4
        )
        assert result[f"median_{name}_ms"] == pytest.approx(1e3 * statistics.median(values))
    ends = [start + whole for start, whole in zip(result["start_times"], e2els, strict=True)]
    assert result["duration"] >= max(ends) - min(result["start_times"]) - 5e-3
    assert measured["seconds"] == pytest.approx(result["duration"], rel=1e-4)
    speed = sum(output) / result["duration"]
    assert measured["output_tokens_per_second"] == pytest.approx(speed, rel=1e-4)
    assert result["output_throughput"] == pytest.approx(speed)


def test_w5_ends_with_arrivals_at_a_share_of_what_it_reached(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = bench(url, tmp_path, "W5", "--scale", "0.02", "--repeats", "1")
    assert [line["at"].get("max_concurrency") for line in lines] == [1, 5, None]
    assert [line["workload"] for line in lines] == ["W5"] * 3
    last = lines[-1]
    assert last["at"]["request_rate"] == "70 % of capacity"
    best = max(line["measured"]["requests_per_second"] for line in lines[:2])
    assert last["measured"]["offered_requests_per_second"] == pytest.approx(0.7 * best, rel=1e-4)
    assert "70 % of capacity" in capsys.readouterr().out


def test_chats_find_what_was_said_in_the_prefix_cache(url: str, tmp_path: Path) -> None:
    """8 chats of 3 turns after 160 tokens that they share: all but the first find them."""
    lines = bench(url, tmp_path, "W7", "--scale", "0.125", "--random-prefix-len", "160",
                  "--max-concurrency", "1")  # fmt: skip
    (line,) = lines
    assert line["failed"] == 0
    # 8 tokens said and 16 answered a turn: two turns, as W7 has 8 of them and 0.125 are two.
    prompts = [160 + 8, 160 + 8 + 16 + 8]
    chats = 8
    num_hits = (chats - 1) * 160 + chats * (160 + 16)  # Blocks of 16 tokens.
    assert line["measured"]["prefix_hit_rate"] == pytest.approx(
        num_hits / (chats * sum(prompts)), abs=0.02
    )


def test_prompts_of_an_earlier_run_are_doubted(url: str, tmp_path: Path) -> None:
    arguments = ["--num-prompts", "4", "--random-input-len", "64", "--random-output-len", "2"]
    fresh = bench(url, tmp_path, *arguments, "--seed", "5")[-1]
    assert fresh["measured"]["prefix_hit_rate"] == 0 and "doubt" not in fresh
    again = bench(url, tmp_path, *arguments, "--seed", "5")[-1]
    assert again["measured"]["prefix_hit_rate"] > 0.5 and "--seed" in again["doubt"]


def test_failed_requests_are_counted(url: str, tmp_path: Path) -> None:
    (line,) = bench(url, tmp_path, "--num-prompts", "4", "--random-input-len", "500", "520",
                    "--random-output-len", "8", status=1)  # fmt: skip
    assert line["failed"] >= 1 and "status 400" in line["first_failure"]
    assert line["measured"]["requests_per_second"] >= 0


def test_a_chat_endpoint_and_whole_answers(url: str, tmp_path: Path) -> None:
    small = ["--num-prompts", "3", "--random-input-len", "10", "--random-output-len", "5"]
    streamed = bench(url, tmp_path, *small, "--endpoint", "/v1/chat/completions")[-1]
    whole = bench(url, tmp_path, *small, "--no-stream")[-1]
    assert streamed["failed"] == whole["failed"] == 0
    assert "tpot_p50_ms" in streamed["measured"] and "tpot_p50_ms" not in whole["measured"]


def test_a_server_is_started_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "results.jsonl"
    waits: list[float] = []
    sleep = asyncio.sleep

    async def waited(seconds: float) -> None:
        waits.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr("jackfield.entrypoints.bench.serve.command.asyncio.sleep", waited)
    status = run(["serve", "streams", "--engine", "jackfield", *CPU, "--scale", "0.02", "--repeats",
                  "1", "--idle-seconds", "0.125", "--output", str(out)])  # fmt: skip
    assert status == 0 and 0.125 in waits
    start, line = (json.loads(text) for text in out.read_text().splitlines())
    assert start["workload"] == "server start" and line["workload"] == "streams"
    assert 0 < start["measured"]["ready_s"] < start["measured"]["first_token_s"] < 120
    assert line["idle_seconds"] == 0.125
    assert line["engine"] == "jackfield" and line["options"] == CPU and line["engine_version"]


def test_a_server_that_cannot_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--engine", "jackfield", "--max-modl-len", "5", "--output", "-"]) == 1
    assert "did you mean --max-model-len" in capsys.readouterr().err


def test_a_missing_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--port", "9", "--output", "-"]) == 1
    assert "no server answers at http://127.0.0.1:9/v1/models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "output"),
    [
        (["W2"], "'W2' is none of those"),
        (["--num-prompts", "0"], "--num-prompts: must be a number at least 1, got '0'"),
        (["--request-rate", "-1"], "--request-rate: must be a number above 0"),
        (["--request-rate", "fast"], "--request-rate: must be a number above 0, got 'fast'"),
        (["--idle-seconds", "-1"], "--idle-seconds: must be a number at least 0"),
        (["--burstiness", "nan"], "--burstiness: must be a number above 0"),
        (["--random-input-len", "5", "3"], "--random-input-len: one length or a range, got 5 3"),
        (["--random-output-len", "1", "2", "3"], "--random-output-len"),
        (["--random-range-ratio", "1"], "--random-range-ratio: must be below 1"),
        (["--percentile-metrics", "ttft,speed"], "'speed' is none of ttft, tpot, itl, e2el"),
        (["--metric-percentiles", "50,101"], "must be numbers from 0 to 100"),
        (["--extra-body", "[1]"], "--extra-body: must be a JSON object"),
        (["W7", "--endpoint", "/v1/chat/completions"], "--endpoint: W7"),
        (["W5", "--result-filename", "a.json"], "--result-filename: there are several loads"),
        (["--max-concurency", "3"], "did you mean --max-concurrency"),
    ],
)
def test_bad_flags_are_refused_by_name(
    options: list[str], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        run(["serve", *options])
    assert raised.value.code == 2
    assert output in capsys.readouterr().err


def test_options_of_vllms_benchmark_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    args, _ = parse(["--backend", "openai-chat", "--dataset-name", "random"])
    assert args.endpoint == "/v1/chat/completions"
    assert parse(["--backend", "vllm"])[0].endpoint == "/v1/completions"
    with pytest.raises(SystemExit):
        parse(["--dataset-name", "sharegpt"])
    assert "--dataset-name: there is no sharegpt here" in capsys.readouterr().err


def test_flags_mean_what_they_mean_to_vllm() -> None:
    args, _ = parse(["--random-input-len", "100", "--random-range-ratio", "0.25", "--num-prompts",
                     "7", "--random-prefix-len", "30", "--random-output-len", "8",
                     "--request-rate", "3", "--max-concurrency", "2"])  # fmt: skip
    (workload,) = chosen_workloads(args)
    assert workload.prompt == (75, 125) and workload.output == (6, 10)
    (way,) = ways(workload, args)
    assert (way.requests, way.rate, way.max_concurrency) == (7, 3.0, 2)
    chats = draw_chats(workload, 1000, 1, 7)
    first = chats[0][0].prompt[:30]
    for (request,) in chats:
        assert request.prompt[:30] == first and 105 <= len(request.prompt) <= 155
    assert len({tuple(request.prompt[30:40]) for (request,) in chats}) == 7


def test_w7_shares_its_system_prompt_and_nothing_else() -> None:
    chats = draw_chats(WORKLOADS["W7"], 151936, 1, 64)
    assert len(chats) == 64 and {len(chat) for chat in chats} == {8}
    assert len({tuple(chat[0].prompt[:2000]) for chat in chats}) == 1
    assert len({tuple(turn.prompt[-64:]) for chat in chats for turn in chat}) == 64 * 8
    other = draw_chats(WORKLOADS["W7"], 151936, 2, 64)
    assert other[0][0].prompt[:16] != chats[0][0].prompt[:16], "no repeat finds the one before"


def test_agents_read_results_of_typical_lengths() -> None:
    chats = draw_chats(WORKLOADS["agents"], 151936, 1, 64)
    assert len(chats) == 64 and {len(chat) for chat in chats} == {6}
    assert len({tuple(chat[0].prompt[:2000]) for chat in chats}) == 1
    lengths = sorted(len(turn.prompt) for chat in chats for turn in chat[1:])
    assert 300 < lengths[len(lengths) // 2] < 530 and lengths[-1] <= 4000 and lengths[0] >= 20
    assert len({turn.output for chat in chats for turn in chat}) > 50


def test_bursts_come_together_beside_streams() -> None:
    workload = WORKLOADS["bursts"].scaled(0.1)
    (way,) = ways(workload, make_parser().parse_args([]))
    chats = draw_chats(workload, 151936, 1, way.requests)
    load = way.load(workload, chats, 0)
    groups = [chat[0].group for chat in chats]
    assert groups == ["stream"] * 13 + ["burst"] * 24
    assert load.offsets == [0.0] * 13 + [2.0 * (1 + n // 5) for n in range(24)]
    assert {len(chat[0].prompt) for chat in chats[13:]} == {150}


def test_latencies_of_groups_are_told_apart(url: str, tmp_path: Path) -> None:
    (line,) = bench(url, tmp_path, "bursts", "--scale", "0.02", "--num-prompts", "2", warmups=2)
    assert line["failed"] == 0
    measured = line["measured"]
    assert measured["stream_itl_p99_ms"] > 0 and measured["burst_ttft_p99_ms"] > 0
    assert "burst_itl_p99_ms" not in measured, "a burst's answers are one token"
    assert measured["itl_p99_ms"] == measured["stream_itl_p99_ms"]


def serves(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "--port" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return False


def test_a_benchmark_that_is_ended_ends_its_server() -> None:
    command = [
        sys.executable, "-m", "jackfield.entrypoints.cli.main", "bench", "serve", "streams",
        "--engine", "jackfield", *CPU, "--output", "-",
    ]  # fmt: skip
    process = forked.Tree(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    started: set[int] = set()
    try:
        while not any(map(serves, started)):
            assert process.poll() is None
            started = descendants([process.pid]) - {process.pid}
            time.sleep(0.01)
        process.terminate()
        assert process.wait(300) == 128 + signal.SIGTERM
        while any(map(serves, started)):  # A server's own children end a moment after it.
            time.sleep(0.01)
    finally:
        process.kill()
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
