"""All that a process started is ended: orphans, other sessions, what ignores SIGTERM."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import os, subprocess, time
from jackfield.entrypoints.bench import process_tree
from jackfield.entrypoints.bench.process_tree import adopt_orphans, descendants, end_descendants

def words_of(pid):
    try:
        return open(f"/proc/{pid}/cmdline").read().split("\\0")[:-1]
    except OSError:  # It has just ended.
        return []

def running():
    pids = descendants([os.getpid()]) - {os.getpid()}
    return sorted(" ".join(words) for words in map(words_of, pids) if words[:1] == ["sleep"])

def until(commands):
    for _ in range(3000):
        if running() == commands:
            return
        time.sleep(0.01)
    raise SystemExit(f"these run: {running()}")

def shell(text):
    nothing = subprocess.DEVNULL  # Else what stays when this fails would keep our pipe open.
    return subprocess.Popen(["sh", "-c", text], stdout=nothing, stderr=nothing)

process_tree.GRACE_SECONDS = 0.2
adopt_orphans()
kept = shell("sleep 1000 & wait")
shell("setsid sleep 1001 & exit 0").wait()
shell("trap '' TERM; sleep 1002 & wait; wait")
until(["sleep 1000", "sleep 1001", "sleep 1002"])
assert end_descendants(keep=[kept.pid]) == set()
print(running(), kept.poll())
end_descendants()
print(running())
"""


def test_all_but_those_to_keep_are_ended() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "['sleep 1000'] None\n[]\n", done.stderr


FIRST_THREAD_ENDS = """
import ctypes, os, signal, subprocess, sys, threading, time
from pathlib import Path
from jackfield.entrypoints.bench import process_tree
from jackfield.entrypoints.bench.process_tree import descendants, end_descendants

WITHOUT_FIRST_THREAD = '''
import ctypes, signal, sys, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=time.sleep, args=[1000]).start()
ctypes.CDLL(None).syscall(60, 0)  # exit, of this thread alone
'''
process_tree.GRACE_SECONDS = 0.2
child = subprocess.Popen([sys.executable, "-c", WITHOUT_FIRST_THREAD])
state = lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
while state() != "Z":
    time.sleep(0.01)
threads = lambda: len(list(Path(f"/proc/{child.pid}/task").iterdir()))
print(threads(), descendants([os.getpid()]) == {os.getpid(), child.pid})
left, after = end_descendants(), threads()
child.kill()
print(left, after, child.wait())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="it knows the system call's number")
def test_a_process_whose_first_thread_has_ended_is_ended() -> None:
    """So a process looks while another of its threads closes the device."""
    done = subprocess.run([sys.executable, "-c", FIRST_THREAD_ENDS], capture_output=True, text=True)
    assert done.stdout == "2 True\nset() 1 -9\n", done.stderr


INHERITED = """
import os, subprocess, time
from jackfield.entrypoints.bench import process_tree
from jackfield.entrypoints.bench.process_tree import adopt_orphans, descendants, end_descendants

process_tree.GRACE_SECONDS = 0.2
adopt_orphans()
kept = subprocess.Popen(
    ["sh", "-c", "(setsid sleep 1000 & echo $!); read word"], stdin=subprocess.PIPE,
    stdout=subprocess.PIPE, preexec_fn=adopt_orphans,
)
orphan = int(kept.stdout.readline())
parent = lambda: int(open(f"/proc/{orphan}/stat").read().rpartition(")")[2].split()[1])
while parent() not in (kept.pid, os.getpid()):
    time.sleep(0.01)
end_descendants(keep=[kept.pid])
print(descendants([os.getpid()]) == {os.getpid(), kept.pid, orphan})
end_descendants()
print(descendants([os.getpid()]) == {os.getpid()})
"""


def test_orphans_of_a_process_to_keep_are_kept() -> None:
    done = subprocess.run([sys.executable, "-c", INHERITED], capture_output=True, text=True)
    assert done.stdout == "True\nTrue\n", done.stderr
