"""`jackfield run-batch`, as a process: equal to the server, resumable, an error a line."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import httpx
import pytest
from encoders import save_encoder
from serving import MODEL, engine_config, running, save_random

from jackfield import EngineConfig
from jackfield.entrypoints.cli.main import main

Run = Callable[..., "subprocess.CompletedProcess[str]"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"))


def request(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"seed": 1, **body}}


def chat(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return request(custom_id, CHAT, messages=messages, max_tokens=6, **body)


def write(path: Path, lines: list[Any]) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(line + "\n" for line in text))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(checkpoint: Path, input_path: Path, output_path: Path, *flags: str) -> list[str]:
    return [
        sys.executable, "-m", "jackfield.entrypoints.cli.main", "run-batch",
        "-i", str(input_path), "-o", str(output_path), "--model", str(checkpoint),
        "--served-model-name", MODEL, "other", "--device", "cpu", "--dtype", "float32",
        "--attention-backend", "torch", "--max-model-len", "512",
        "--num-gpu-blocks-override", "200", "--max-num-seqs", "8", *flags,
    ]  # fmt: skip


def run(
    checkpoint: Path, input_path: Path, output_path: Path, *flags: str
) -> subprocess.CompletedProcess[str]:
    argv = command(checkpoint, input_path, output_path, *flags)
    return forked.run(argv, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


@pytest.fixture
def run_here(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run` without a process, which takes longer to start than these inputs take."""

    def run_main(
        checkpoint: Path, input_path: Path, output_path: Path, *flags: str
    ) -> subprocess.CompletedProcess[str]:
        argv = command(checkpoint, input_path, output_path, *flags)
        status = main(argv[3:])
        return subprocess.CompletedProcess(argv, status, *capsys.readouterr())

    return run_main


def test_results_are_the_servers_and_in_the_inputs_order(checkpoint: Path, tmp_path: Path) -> None:
    requests = [
        chat("first", "Hello", temperature=0.7),
        request("second", COMPLETE, prompt=["a", "b"], max_tokens=30, n=2, logprobs=1),
        chat("third", "How?", model="other", n=3),
        request("fourth", COMPLETE, prompt="The", max_tokens=3, temperature=0),
        request("large", COMPLETE, prompt="word " * 100_000, truncate_prompt_tokens=20),
    ]
    output_path = tmp_path / "folder" / "out.jsonl"
    completed = run(checkpoint, write(tmp_path / "in.jsonl", requests), output_path)
    assert completed.returncode == 0, completed.stderr
    assert "Running batch: 100%" in completed.stderr and "5/5" in completed.stderr
    assert completed.stdout.startswith(f"5 results in {output_path}; 0 failed now; ")
    results = read(output_path)
    assert [line["custom_id"] for line in results] == [result["custom_id"] for result in requests]
    names = (MODEL, "other")
    with running(engine_config(checkpoint, served_model_name=names, device="cpu")) as server:
        for line, result in zip(results, requests, strict=True):
            response = httpx.post(server.url + result["url"], json=result["body"], timeout=300)
            assert line["error"] is None and line["response"]["status_code"] == response.status_code
            expected, body = response.json(), line["response"]["body"]
            # Logits differ in their last bits with what else is in a step.
            for choice, other in zip(body["choices"], expected["choices"], strict=True):
                logprobs, other_logprobs = choice.pop("logprobs"), other.pop("logprobs")
                if other_logprobs is not None:
                    assert logprobs["tokens"] == other_logprobs["tokens"]
                    assert logprobs["token_logprobs"] == pytest.approx(
                        other_logprobs["token_logprobs"], abs=1e-4
                    )
            assert body["choices"] == expected["choices"]
            assert body["model"] == expected["model"]
            for usage in (body["usage"], expected["usage"]):
                usage.pop("prompt_tokens_details")  # What is cached depends on the order.
            assert body["usage"] == expected["usage"]


def test_vectors_and_scores_are_the_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cross-encoder scores and reranks, an encoder embeds; each refuses what the other does."""
    documents = ["a dog", "paris is in france"]
    requests = [
        request("vector", "/v1/embeddings", input=["the cat", "a dog"]),
        request("score", "/score", text_1="who is it", text_2=documents),
        request("rerank", "/v2/rerank", query="who is it", documents=documents, top_n=1),
    ]
    input_path = write(tmp_path / "in.jsonl", requests)
    for kind, more, good in (
        ("Model", {}, {"vector", "score", "rerank"}),
        ("ForSequenceClassification", {"num_labels": 1}, {"score", "rerank"}),
    ):
        folder = save_encoder(tmp_path / kind, "Bert", kind, **more)
        output_path = tmp_path / f"{kind}.jsonl"
        flags = ["--model", str(folder), "--device", "cpu", "--dtype", "float32", "--disable-tqdm"]
        assert main(["run-batch", "-i", str(input_path), "-o", str(output_path), *flags]) == 0
        assert f"{3 - len(good)} failed now" in capsys.readouterr().out
        config = EngineConfig(model=str(folder), device="cpu", dtype="float32")
        with running(config) as server:
            for line, item in zip(read(output_path), requests, strict=True):
                response = httpx.post(server.url + item["url"], json=item["body"], timeout=300)
                assert line["response"]["status_code"] == response.status_code
                assert (response.status_code == 200) == (item["custom_id"] in good)
                expected, body = response.json(), line["response"]["body"]
                for name in ("id", "created"):
                    expected.pop(name, None), body.pop(name, None)
                assert numbers(body) == pytest.approx(numbers(expected), abs=1e-5)
                assert without_numbers(body) == without_numbers(expected)


def numbers(value: Any) -> list[float]:
    """Of a JSON value, in order."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return [number for part in parts for number in numbers(part)]
    return [value] if isinstance(value, float) else []


def without_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [without_numbers(part) for part in value]
    return None if isinstance(value, float) else value


def test_each_bad_line_is_an_error_with_its_number_and_stops_no_other(
    checkpoint: Path, tmp_path: Path, run_here: Run
) -> None:
    requests = [
        "\ufeff" + json.dumps(chat("good", "Hello")),
        "{ not json",
        "",
        {"custom_id": "no body", "method": "POST", "url": CHAT},
        {**chat("get", "x"), "method": "GET"},
        {**chat("nowhere", "x"), "url": "/v1/../metrics"},
        chat("good", "again"),
        chat("hot", "x", temperature=300),
        chat("unknown", "x", model="gpt-6"),
        chat("streamed", "x", stream=True),
        json.dumps(chat("long", "x" * 5000)),
        json.dumps({**chat("", "x")}),
        "[1, 2]",
        request("vectors", "/v1/embeddings", input="x"),
        '{"custom_id": "huge", "body": {"n": 1e999}}',
        chat("last", "Hello"),
    ]
    output_path = tmp_path / "out.jsonl"
    input_path = write(tmp_path / "in.jsonl", requests)
    completed = run_here(
        checkpoint, input_path, output_path, "--max-body-bytes", "4000", "--disable-tqdm"
    )
    assert completed.returncode == 0 and completed.stderr == ""
    assert "13 failed now" in completed.stdout
    rows = [
        (line["custom_id"], line["error"] and (line["error"]["code"], line["error"].get("line")))
        for line in read(output_path)
    ]
    assert rows == [
        ("good", None),
        (None, ("invalid_json_line", 2)),
        ("no body", ("invalid_request_line", 4)),
        ("get", ("invalid_method", 5)),
        ("nowhere", ("invalid_url", 6)),
        ("good", ("duplicate_custom_id", 7)),
        ("hot", ("400", None)),
        ("unknown", ("model_not_found", None)),
        ("streamed", ("invalid_body", 10)),
        (None, ("line_too_long", 11)),
        ("", ("invalid_custom_id", 12)),
        (None, ("invalid_request_line", 13)),
        ("vectors", ("400", None)),
        (None, ("invalid_json_line", 15)),
        ("last", None),
    ]
    hot = read(output_path)[6]
    assert hot["response"]["status_code"] == 400
    assert hot["response"]["body"]["error"]["param"] == hot["error"]["param"] == "temperature"
    assert read(output_path)[2]["error"]["message"].startswith("line 4: ")
    huge = read(output_path)[-2]["error"]
    assert huge["message"] == "line 15: body.n: 1e999 is out of range"
    assert huge["param"] == "body.n"
    again = run_here(
        checkpoint, input_path, output_path, "--max-body-bytes", "4000", "--disable-tqdm"
    )
    assert "15 results" in again.stdout and "15 of them found there already" in again.stdout


@pytest.mark.slow
def test_a_killed_run_goes_on_with_what_is_missing(
    checkpoint: Path, tmp_path: Path, run_here: Run
) -> None:
    requests = [
        request(f"r{number}", COMPLETE, prompt=f"{number} ", max_tokens=40, ignore_eos=True)
        for number in range(60)
    ]
    input_path, output_path = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    argv = command(checkpoint, input_path, output_path, "--max-concurrency", "4")
    process = forked.Popen(argv, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not output_path.exists() or output_path.read_bytes().count(b"\n") < 8:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    whole = output_path.read_bytes()
    count = whole.count(b"\n")
    assert 8 <= count < 60
    # As if the kill had come in the middle of a write.
    cut = whole[: whole.rstrip(b"\n").rindex(b"\n") + 200]
    output_path.write_bytes(cut)
    lines_before = {json.loads(line)["custom_id"]: line for line in cut.splitlines()[:-1]}
    assert len(lines_before) < 60
    # Now into an engine that is full most of the time: that is no failure, but waited for.
    completed = run_here(
        checkpoint, input_path, output_path, "--max-num-seqs", "4", "--max-waiting-requests", "1"
    )
    assert completed.returncode == 0, completed.stderr
    assert (
        f"60 results in {output_path}, {len(lines_before)} of them found there already"
        in completed.stdout
    )
    lines = output_path.read_bytes().splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == [f"r{n}" for n in range(60)]
    assert all(json.loads(line)["error"] is None for line in lines)
    for line in lines:  # What was there is there still, to the byte: it was not computed again.
        assert lines_before.get(json.loads(line)["custom_id"], line) == line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("precious notes\n", "line 1 is not a result of a batch"),
        ("precious notes", "line 1 is not a result of a batch"),
        ('{"id":"batch_req_1_0000000000000000"}\n', "not of this input"),
    ],
)
def test_a_file_of_something_else_is_not_touched(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    input_path, output_path = write(tmp_path / "in.jsonl", [chat("a", "x")]), tmp_path / "out.jsonl"
    output_path.write_text(content)
    with warnings.catch_warnings(record=True) as left_open:
        warnings.simplefilter("always", ResourceWarning)
        assert main(["run-batch", "-i", str(input_path), "-o", str(output_path)]) != 0
        gc.collect()
    assert not [each for each in left_open if "unclosed file" in str(each.message)]
    assert message in capsys.readouterr().err
    assert output_path.read_text() == content


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-i", "{folder}/none", "-o", "{folder}/out"], "--input-file: there is no file"),
        (["-i", "https://host/in", "-o", "{folder}/out"], "--input-file: 'https://host/in' is a"),
        (["-i", "{folder}/in", "-o", "{folder}/in"], "--output-file: must not be the input file"),
        (
            ["-i", "{folder}/in", "-o", "{folder}/out", "--max-concurrency", "0"],
            "--max-concurrency: must be at least 1, got 0",
        ),
    ],
)
def test_wrong_flags_are_named(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in", [chat("a", "x")])
    assert main(["run-batch", *(flag.format(folder=tmp_path) for flag in flags)]) == 2
    assert message in capsys.readouterr().err
