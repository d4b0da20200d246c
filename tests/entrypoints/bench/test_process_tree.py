"""All that a process started is ended: orphans, other sessions, what ignores SIGTERM."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, subprocess, time
from jackfield.entrypoints.bench import process_tree
from jackfield.entrypoints.bench.process_tree import adopt_orphans, descendants, end_descendants

def running():
    pids = descendants([os.getpid()]) - {os.getpid()}
    commands = [open(f"/proc/{pid}/cmdline").read().split("\\0")[:-1] for pid in pids]
    return sorted(" ".join(words) for words in commands if words[0] == "sleep")

def until(commands):
    for _ in range(3000):
        if running() == commands:
            return
        time.sleep(0.01)
    raise SystemExit(f"these run: {running()}")

def shell(text):
    return subprocess.Popen(["sh", "-c", text])

process_tree.GRACE_SECONDS = 0.2
adopt_orphans()
kept = shell("sleep 1000 & wait")
shell("setsid sleep 1001 & exit 0").wait()
shell("trap '' TERM; sleep 1002 & wait; wait")
until(["sleep 1000", "sleep 1001", "sleep 1002"])
end_descendants(keep=[kept.pid])
print(running(), kept.poll())
end_descendants()
print(running())
"""


def test_all_but_those_to_keep_are_ended() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "['sleep 1000'] None\n[]\n", done.stderr
