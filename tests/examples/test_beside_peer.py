"""Models beside a peer: engines that fail, hang or come too late, and what is left of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import forked
import pytest

import jackfield
from jackfield.core.loading.checkpoint_folder import checkpoint_folder

SCRIPT = Path(jackfield.__file__).resolve().parent / "examples/benchmarks/beside_peer.py"
CPU = ["--device", "cpu", "--attention-backend", "torch"]
TINY = ["--scale", "0.02", "--repeats", "1", "--ceilings", "none", *CPU]
SMALL = ["--workloads", "W1", *TINY]
MARK = "BESIDE_PEER_TEST"
EMBEDDED = ""


class Ended(NamedTuple):
    """What a run left."""

    status: int
    table: str
    log: str
    lines: list[dict[str, Any]]

    def measured(self) -> list[tuple[str, str, str]]:
        """(engine, model, workload) in the order of the lines."""
        return [(x["engine"], x["model"], x["workload"]) for x in self.lines if "measured" in x]

    def failures(self) -> dict[tuple[str, str], str]:
        """(label, model) → reason"""
        return {(x["workload"], x["model"]): x["error"] for x in self.lines if "error" in x}


def beside(folder: Path, *arguments: str, peer: str = "jackfield", **more: str) -> Ended:
    """Run the program, by default with our own engine as its peer; none of its processes may
    outlive it. `more`: of its environment."""
    out, mark = folder / "lines.jsonl", f"{os.getpid()} {folder}"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--peer", peer, "--commit", "abc",
         "--output", str(out)],
        env={**os.environ, MARK: mark, **more}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert left_over(mark) == []
    assert all(line["commit"] == "abc" and line["device"] and line["date"] for line in lines)
    assert len({line["run"] for line in lines}) == 1
    return Ended(done.returncode, done.stdout, done.stderr, lines)


def left_over(mark: str) -> list[str]:
    """Command lines of processes that still run with this environment; they are killed."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_text())
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            continue
    return found


STUCK = """
from jackfield import hookimpl
from jackfield.core.hook_versions import API_VERSION as jackfield_api

@hookimpl
def register_models(registry):
    registry.add("StuckForCausalLM", "stuck_model:Stuck")
"""


def waits_for_ever(folder: Path) -> tuple[str, str]:
    """A checkpoint of a plugin's model whose module does not end its import; and PYTHONPATH."""
    checkpoint, site = folder / "stuck", folder / "site"
    shutil.copytree(checkpoint_folder(EMBEDDED), checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = ["StuckForCausalLM"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    facts = site / "stuck-1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: stuck\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[jackfield]\nstuck = stuck_plugin\n")
    (site / "stuck_plugin.py").write_text(STUCK)
    (site / "stuck_model.py").write_text("import time\n\ntime.sleep(3600)\n")
    return str(checkpoint), forked.python_path(site)


@pytest.mark.slow
def test_one_engine_fails_and_the_others_are_measured(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    ended = beside(tmp_path, "run", "--models", missing, EMBEDDED, *SMALL, "--no-compile")
    assert ended.status == 1
    engines = [(engine, "embedded") for engine in ("jackfield (peer)", "jackfield")]
    expected = [(*engine, workload) for engine in engines for workload in ("start", "W1")]
    assert ended.measured() == expected
    reason = "ended with status 2 while starting"
    labels = ("jackfield (peer)", "jackfield")
    assert ended.failures() == {(label, missing): reason for label in labels}
    for line in (each for each in ended.lines if "error" in each):
        assert missing in line["log"][-1] and line["log"][-1] in ended.log
    theirs, own = (x["measured"]["ms_per_token"] for x in ended.lines if x["workload"] == "W1")
    assert f"{theirs / own:.4g}" in ended.table.splitlines()[-1].split()
    (start, own_start) = [x for x in ended.lines if x["workload"] == "start"]
    assert "not alone" in start["at"] and "at" not in own_start


@pytest.mark.slow
def test_engines_that_hang_are_ended_and_the_others_are_measured(tmp_path: Path) -> None:
    """One hangs while it starts; the other, at its turn, would measure for days."""
    stuck, path = waits_for_ever(tmp_path)
    ended = beside(
        tmp_path, "run", "--models", stuck, EMBEDDED, "--workloads", "W2", *TINY,
        "--start-timeout", "30", "--measure-timeout", "15", "--no-compile",
        "--peer-flags", "--repeats 1000000000 --keep-partial", PYTHONPATH=path,
    )  # fmt: skip
    assert ended.status == 1
    assert ended.failures() == {
        ("jackfield (peer)", stuck): "still starting after 30 s",
        ("jackfield", stuck): "still starting after 30 s",
        ("jackfield (peer)", "embedded"): "still measuring after 15 s",
    }
    assert ended.measured()[-2:] == [("jackfield", "embedded", name) for name in ("start", "W2")]
    assert any(line.get("partial") for line in ended.lines)


@pytest.mark.slow
def test_a_run_ends_at_its_deadline(tmp_path: Path) -> None:
    stuck, path = waits_for_ever(tmp_path)
    ended = beside(
        tmp_path, "run", "--models", stuck, EMBEDDED, *SMALL, "--deadline", "30", "--side-by-side",
        "1", PYTHONPATH=path,
    )  # fmt: skip
    assert ended.status == 1 and ended.measured() == []
    assert ended.failures() == {
        ("jackfield (peer)", stuck): "starting when its 30 s ended the run",
        ("jackfield", stuck): "not begun when its 30 s ended the run",
        ("jackfield (peer)", "embedded"): "not begun when its 30 s ended the run",
        ("jackfield", "embedded"): "not begun when its 30 s ended the run",
    }


@pytest.mark.slow
def test_servers_are_sent_the_same_traffic(tmp_path: Path) -> None:
    load = ["--num-prompts", "6", "--random-input-len", "5", "9", "--random-output-len", "2", "4"]
    ended = beside(
        tmp_path, "serve", "--model", EMBEDDED, *load, "--request-rate", "50", "90", *CPU,
        "--ours", "--ttft-target-ms 50", "--ours=--enforce-eager", "--save-detailed",
        "--result-dir", str(tmp_path / "results"),
    )  # fmt: skip
    assert ended.status == 0, ended.log
    assert ended.log.count("compiled") == 2
    expected = {"server start": 1, "random": 2}
    counts = Counter((tuple(line["options"][-2:]), line["workload"]) for line in ended.lines)
    for options in (CPU[-2:], ["--ttft-target-ms", "50"], ["torch", "--enforce-eager"]):
        assert {key: counts[tuple(options), key] for key in expected} == expected
    assert [x["at"]["request_rate"] for x in ended.lines if "random" in x["workload"]] == [
        "50", "90", "50", "90", "50", "90",
    ]  # fmt: skip
    assert all(x["failed"] == 0 for x in ended.lines if x["workload"] == "random")
    results = [json.loads(file.read_text()) for file in (tmp_path / "results").iterdir()]
    lengths = [(sorted(each["input_lens"]), sorted(each["output_lens"])) for each in results]
    assert len(lengths) == 6 and all(each == lengths[0] for each in lengths)


PEER = """
import json, os, subprocess, sys, time
from pathlib import Path

__version__ = "0"
HERE = Path(__file__).parent
DEAF = f'''
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open({str(HERE / "pids")!r}, "a") as pids:
    print(os.getpid(), file=pids, flush=True)
time.sleep(1000)
'''
DEAF_TREE = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]);" + DEAF


class SamplingParams:
    def __init__(self, max_tokens, **_):
        self.token_ids = [0] * max_tokens


class Output:
    def __init__(self, params):
        self.outputs = [params]


class LLM:
    def __init__(self, model, **options):
        with open(HERE / "options", "a") as lines:
            print(json.dumps(options), file=lines)
        if Path(model).name == "stuck":
            deaf = [sys.executable, "-c", DEAF]
            subprocess.Popen(deaf, start_new_session=True)
            subprocess.Popen([sys.executable, "-c", DEAF_TREE, DEAF], start_new_session=True)
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.execv(sys.executable, deaf)
                os._exit(0)
            time.sleep(1000)

    def generate(self, prompts, params, use_tqdm):
        return [Output(each) for each in params]

    def reset_prefix_cache(self):
        pass
"""
"""A package `vllm` whose engine never starts with the model `stuck`, and has four more processes
that ignore SIGTERM: two in sessions of their own, a child of one, and a daemon."""

SMI = """#!{python}
import sys
from pathlib import Path

def runs(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

query = sys.argv[1]
answers = {
    "--query-gpu=clocks.current.sm": "1200", "--query-gpu=power.draw": "512.25",
    "--query-gpu=temperature.gpu": "[N/A]",
    "--query-gpu=clocks_throttle_reasons.active": "0x0000000000000044",
}
if query in answers:
    print(answers[query])
elif query.startswith("--query-compute-apps"):
    pids = Path("{pids}").read_text().split()
    print(*(f"{pid}, 100" for pid in ["1", *filter(runs, pids)]), sep="\\n")
elif "_reasons_counters." in query:
    calls = Path("{pids}").with_name("calls")
    count = len(calls.read_text()) if calls.exists() else 0
    calls.write_text("x" * (count + 1))
    print(f"{2500000 * count}, 0, 0, {1000 * count}")
else:
    raise SystemExit(2)
"""
"""An `nvidia-smi` that takes those processes for processes on the GPU."""


@pytest.mark.slow
def test_nothing_of_an_engine_that_was_ended_runs_while_the_next_measures(tmp_path: Path) -> None:
    stuck, pids, smi = tmp_path / "stuck", tmp_path / "pids", tmp_path / "nvidia-smi"
    shutil.copytree(checkpoint_folder(EMBEDDED), stuck)
    (tmp_path / "vllm.py").write_text(PEER)
    smi.write_text(SMI.replace("{python}", sys.executable).replace("{pids}", str(pids)))
    smi.chmod(0o755)
    ended = beside(
        tmp_path, "run", "--models", str(stuck), EMBEDDED, *SMALL, "--no-compile",
        "--start-timeout", "30", peer="vllm", PATH=f"{tmp_path}:{os.environ['PATH']}",
        PYTHONPATH=forked.python_path(tmp_path),
    )  # fmt: skip
    assert ended.failures() == {("vllm", str(stuck)): "still starting after 30 s"}
    assert len(set(pids.read_text().split())) == 4
    measured = [x for x in ended.lines if "measured" in x and x["workload"] != "start"]
    assert [(x["engine"], x["model"]) for x in measured] == [
        ("jackfield", str(stuck)), ("vllm", "embedded"), ("jackfield", "embedded"),
    ]  # fmt: skip
    for number, line in enumerate(measured):
        assert line["gpu_before"] == {
            "sm_clock_mhz": 1200, "power_w": 512.25,
            "throttled_by": ["power cap", "thermal slowdown (hardware)"],
            "throttled_s": {
                "power cap": 5.0 * number, "power brake": 0.0, "thermal slowdown (software)": 0.0,
                "thermal slowdown (hardware)": 0.002 * number,
            },
            "processes": [[1, 100]],
        }  # fmt: skip
    throttled = [x["throttled_s"] for x in ended.lines if x["workload"] == "gpu"]
    assert [(x["power cap"], x["thermal slowdown (hardware)"]) for x in throttled] == [
        (2.5, 0.001)
    ] * 3
    for line in (tmp_path / "options").read_text().splitlines():
        options = json.loads(line)
        assert options["gpu_memory_utilization"] == 0.1
        assert options["kv_cache_memory_bytes"] == 3_000_000_000
        assert options.get("gdn_prefill_backend") == (None if find_spec("flashinfer") else "triton")
