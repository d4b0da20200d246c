"""A forked program is to others, and to itself, what a started one is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest

FACTS = """
import atexit, os, sys, threading
print([os.getppid(), os.getpgid(0) == os.getpid(), os.getcwd(), sys.argv, sys.path, __name__])
print(dict(os.environ), sys.stdin.read(), os.read(int(os.environ["NUMBER"]), 100))
print([fd for fd in range(3, 50) if os.path.exists(f"/proc/self/fd/{fd}")])
print(open("/proc/self/cmdline").read().rstrip(chr(0)), __file__ if sys.argv[0] != "-c" else "")
atexit.register(print, "at exit")
threading.Thread(target=lambda: print("a thread", file=sys.stderr)).start()
"""
ENDS = {
    "": 0,
    "sys.exit(3)": 3,
    "sys.exit('a reason')": 1,
    "os.kill(os.getpid(), 9)": -signal.SIGKILL,
    "1 / 0": 1,
}


def outcome(start: type[subprocess.Popen[str]], command: list[str], folder: Path) -> object:
    """What a program says of itself and leaves, in a folder, with a descriptor of its own."""
    reader, writer = os.pipe()
    os.write(writer, b"from a pipe")
    os.close(writer)
    changes = {"NUMBER": str(reader), "PYTHONPATH": str(folder), "TMPDIR": "/tmp/none"}
    with start(
        command, cwd=folder, env={**os.environ, **changes}, pass_fds=(reader,), process_group=0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        output, errors = process.communicate("typed", timeout=120)
    os.close(reader)
    return output, errors, process.returncode


@pytest.mark.parametrize("way", ["-c", "-m", "script"])
def test_a_program_has_what_it_was_started_with(way: str, tmp_path: Path) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    command = {
        "-c": ["-c", FACTS], "-m": ["-P", "-m", "facts"], "script": [str(tmp_path / "facts.py")],
    }[way]  # fmt: skip
    command = [sys.executable, *command, "one", "two words"]
    forked_outcome = outcome(forked.Popen, command, tmp_path)
    assert forked_outcome == outcome(subprocess.Popen, command, tmp_path)
    assert "at exit" in str(forked_outcome) and "a thread" in str(forked_outcome)


@pytest.mark.parametrize(("end", "status"), ENDS.items())
def test_a_program_ends_as_it_would(end: str, status: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"import os, sys\n{end}"]
    runs = [run(command, capture_output=True, text=True) for run in (forked.run, subprocess.run)]
    assert [run.returncode for run in runs] == [status] * 2
    assert runs[0].stderr.splitlines()[-1:] == runs[1].stderr.splitlines()[-1:]


def test_it_is_forked() -> None:
    """Otherwise all of this would hold, and save nothing. What reads HF_* is imported by none."""
    program = "import sys; print('torch' in sys.modules, 'huggingface_hub' in sys.modules)"
    output = forked.run([sys.executable, "-c", program], capture_output=True).stdout
    assert output == b"True False\n"


def test_processes_of_a_tree_are_forked_and_are_its_children() -> None:
    program = (
        "import os, subprocess, sys\n"
        "inner = 'import os, sys; print(\"torch\" in sys.modules, os.getppid())'\n"
        "subprocess.run([sys.executable, '-c', inner], check=True)\n"
        "print(os.getpid())"
    )
    with forked.Tree([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=120)
    assert output.split() == ["True", str(process.pid), str(process.pid)]
