"""Python programs as processes that need not import torch again, which takes two seconds of CPU.

`Popen` and `run` are `subprocess`'s. A command of this interpreter (`[sys.executable, "-m", …]`,
`-c`, or a script) becomes a fork of a fork server that has imported what a server needs. To its
parent it is what it would have been: a child, with its own command line, environment, folder,
descriptors, process group and exit status. What is about imports at a start, or about how an
interpreter ends (`atexit` runs, but modules are not taken apart), uses `subprocess`.

`Tree` is a `Popen` of a program whose own processes are forked, too: front ends, ranks, members.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import uvloop

FIRST = (
    "jackfield.core.worker.worker", "jackfield.entrypoints.cli.run_batch",
    "jackfield.entrypoints.cli.serve", "jackfield.entrypoints.server.frontends.supervisor",
    "openai", "uvloop",
)  # fmt: skip
"""Modules of servers and their clients that start no thread and read none of INTERPRETER."""
PRELOADED = (
    *FIRST, "jackfield.core.worker.start.device_init", "jackfield.plugins.attention.flashinfer",
    "jackfield.plugins.attention.torch", "jackfield.plugins.attention.triton",
    "jackfield.plugins.executors.inprocess", "jackfield.plugins.loaders.safetensors",
    "jackfield.plugins.models.qwen3", "jackfield.plugins.operations.triton",
)  # fmt: skip
"""Those of a fork server, which is itself forked from one that has FIRST alone."""
INTERPRETER = ("TRITON_INTERPRET",)
"""What is read when Triton is imported."""
VARIABLES = re.compile(
    "HF_.*|HOME|JACKFIELD_.*|MASTER_PORT|NCCL_.*|OLDPWD|PATH|PWD|PYTEST_.*|PYTHONPATH|RANK|RAY_.*"
    "|TMPDIR|TORCHINDUCTOR_CACHE_DIR|WORLD_SIZE|XDG_.*"
)
"""Those that PRELOADED does not read when it is imported; with others, there is another server."""
LIMITED = ("jackfield.core.grammars.sandbox.sandbox_process",)
"""Programs that limit their memory, of which a fork begins with more."""
PLAIN = subprocess.Popen
"""Also in a tree, where `subprocess` has another."""
COMMAND_BYTES = 4000
"""Room for the command line of a fork."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of Linux: who gets the children of a process that has ended."""
START_SECONDS = "PYTEST_FORK_SECONDS"
"""A variable: how long a fork takes to begin, for tests of what is answered in the meantime."""
ADOPTION_SECONDS = 60.0
MOST_DESCRIPTORS = 253
"""Of one message, by the kernel."""


class Program(NamedTuple):
    """What an interpreter is asked to run."""

    kind: str
    """-m, -c or "" (a script)."""
    what: str
    arguments: list[str]
    safe_path: bool


def program_of(args: Any) -> Program | None:
    """Of a command; None: it is not one of this interpreter, or has more options."""
    words = [args] if isinstance(args, str | bytes | os.PathLike) else list(map(os.fspath, args))
    if words[0] != sys.executable or len(words) < 2:
        return None
    safe_path = words[1] == "-P"
    kind, *rest = words[1 + safe_path :]
    if kind in ("-m", "-c"):
        if rest[0] in LIMITED:
            return None
        return Program(kind, rest[0], rest[1:], safe_path)
    return None if kind.startswith("-") else Program("", kind, rest, safe_path)


# ---------------------------------------------------------------- the process that asks


class ForkServer:
    """A process from which others are forked, as the one that asks sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def start(
        cls, environment: dict[str, str], modules: str, by: type[subprocess.Popen[bytes]]
    ) -> ForkServer:
        """modules: the name of a constant."""
        own, other = socket.socketpair()
        with other:
            number = str(other.fileno())
            by(
                [sys.executable, "-P", __file__, number, modules, COMMAND_BYTES * " "],
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # Else numpy starts threads.
                pass_fds=(other.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        return cls(own)

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int | None:
        """→ the process, now a child of this one; None: there is no safe way to fork."""
        prctl = ctypes.CDLL(None).prctl
        with self._lock, open(os.memfd_create("request"), "r+b") as file:
            file.write(json.dumps(request).encode())
            file.seek(0)
            if prctl(SUBREAPER, 1, 0, 0, 0) != 0:
                return None
            try:
                socket.send_fds(self._connection, [b"?"], [file.fileno(), *descriptors])
                return int(self._connection.recv(20)) or None
            finally:
                prctl(SUBREAPER, 0, 0, 0, 0)


_servers: dict[tuple[Any, ...], ForkServer] = {}
"""Name of its modules, and its environment → a server."""


def _environment_of_start(environment: dict[str, str]) -> dict[str, str]:
    """What a fork server has of a program's environment."""
    start = {k: v for k, v in environment.items() if not VARIABLES.fullmatch(k)}
    if "PYTHONPATH" in os.environ:
        start["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return start


def _server(environment: dict[str, str]) -> ForkServer:
    start = _environment_of_start(environment)
    key = ("PRELOADED", *sorted(start.items()))
    if key not in _servers:
        _servers[key] = ForkServer.start(start, "PRELOADED", _OfFirst)
    return _servers[key]


def _first_server(environment: dict[str, str]) -> ForkServer:
    start = {k: v for k, v in environment.items() if k not in INTERPRETER}
    key = ("FIRST", *sorted(start.items()))
    if key not in _servers:
        _servers[key] = ForkServer.start(start, "FIRST", PLAIN)
    return _servers[key]


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, forked where that can be."""

    nested = False
    """Whether what the program starts is forked, too."""
    server = staticmethod(_server)

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any,
        cwd: Any, env: Any, startupinfo: Any, creationflags: Any, shell: bool,
        p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
        *more: Any,
    ) -> None:  # fmt: skip
        *_, start_new_session, process_group = more
        program = program_of(args)
        plain = not (executable or preexec_fn or shell) and close_fds and sys.platform == "linux"
        pid = None
        if plain and program is not None:
            environment = dict(os.environ if env is None else env)
            standard = [0 if p2cread == -1 else p2cread]
            standard.append(1 if c2pwrite == -1 else c2pwrite)
            standard.append(2 if errwrite == -1 else errwrite)
            request = {
                "command": list(map(os.fspath, args)),
                "program": program,
                "nested": self.nested,
                "parent": os.getpid(),
                "environment": environment,
                "folder": os.path.abspath(cwd or "."),
                "numbers": [0, 1, 2, *pass_fds],
                "session": start_new_session,
                "group": process_group,
            }
            pid = self.server(environment).fork(request, [*standard, *pass_fds])
        pipes = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        if pid is None:
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                creationflags, shell, *pipes, *more,
            )  # fmt: skip
            return
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _OfFirst(Popen):
    """Of a fork server."""

    server = staticmethod(_first_server)


class Tree(Popen):
    """Of a program whose own processes are forked, too."""

    nested = True


def run(
    args: Any,
    *,
    timeout: float | None = None,
    check: bool = False,
    capture_output: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, forked where that can be."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    completed = subprocess.CompletedProcess(args, process.returncode, output, errors)
    if check:
        completed.check_returncode()
    return completed


def python_path(*folders: Path) -> str:
    """PYTHONPATH with these folders first: Jackfield may be found by it, not be installed."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH", "")]))


@contextlib.contextmanager
def processes_of(*modules: types.ModuleType) -> Iterator[None]:
    """What these modules start by `subprocess` is forked, too; of asyncio's loop,
    `asyncio.unix_events`."""
    # Else its descriptors would come in the middle of a test that counts them.
    run([sys.executable, "-c", ""], check=True)
    forking = types.SimpleNamespace(**{**vars(subprocess), "Popen": Popen, "run": run})
    with contextlib.ExitStack() as patched:
        for module in modules:
            patched.enter_context(mock.patch.object(module, "subprocess", forking))
        yield


# ---------------------------------------------------------------- the fork server


def main() -> None:
    """Import what `sys.argv` names, then serve."""
    import gc

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # It ends with whoever asks.
    for name in {"FIRST": FIRST, "PRELOADED": PRELOADED}[sys.argv[2]]:
        with contextlib.suppress(ModuleNotFoundError):  # Clients' packages may be absent.
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # Collections of a fork would touch, and so copy, all of it.
    serve(socket.socket(fileno=int(sys.argv[1])))


def serve(asked: socket.socket) -> None:
    """Fork for each request, until whoever asks is gone."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, 1, MOST_DESCRIPTORS)
        if not message:
            return
        if len(os.listdir("/proc/self/task")) > 1:
            asked.send(b"0")
        elif (between := os.fork()) == 0:
            # Its child is given to the nearest process that takes such children: who asked.
            if os.fork() == 0:
                become(asked, descriptors)
            os._exit(0)
        else:
            os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def become(asked: socket.socket, descriptors: list[int]) -> NoReturn:
    """In the fork: be the program that was asked for."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(descriptors.pop(0), "rb") as file:
        request = json.load(file)
    until = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != request["parent"]:
        if time.monotonic() > until:
            os._exit(1)
        time.sleep(0.0005)
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    _servers.clear()
    nested = _fork_server(asked, descriptors) if request["nested"] else None
    _place(descriptors, request["numbers"], asked)
    os.chdir(request["folder"])
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["environment"])
    _name(request["command"])
    program = Program(*request["program"])
    first = {"-m": request["folder"], "-c": ""}.get(program.kind, os.path.dirname(program.what))
    mine = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    here = [] if program.safe_path else [first]
    sys.path[:] = [*here, *mine, *(path for path in sys.path if path not in before)]
    importlib.invalidate_caches()
    if nested is not None:
        start = _environment_of_start(request["environment"])
        _servers["PRELOADED", *sorted(start.items())] = nested
        subprocess.Popen = Popen  # type: ignore[misc]
        uvloop.Loop.subprocess_exec = _subprocess_exec
    time.sleep(float(os.environ.get(START_SECONDS, 0)))
    _end(_run(program))


def _fork_server(asked: socket.socket, descriptors: list[int]) -> ForkServer:
    """→ one of this process's own, while it has no threads yet"""
    own, other = socket.socketpair()
    if os.fork() == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # It ends with whoever asks.
        for item in (own, asked):
            item.close()
        for descriptor in descriptors:
            os.close(descriptor)
        _name(["fork server"])
        serve(other)
        os._exit(0)
    other.close()
    return ForkServer(own)


async def _subprocess_exec(
    loop: Any, make_protocol: Any, *args: Any, stdin: Any = subprocess.PIPE,
    stdout: Any = subprocess.PIPE, stderr: Any = subprocess.PIPE, **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """uvloop's method by asyncio's transport, which starts its process by `subprocess`."""
    protocol, ready = make_protocol(), loop.create_future()
    transport = asyncio.unix_events._UnixSubprocessTransport(  # type: ignore[attr-defined]
        loop, protocol, args, False, stdin, stdout, stderr, 0, waiter=ready, **options
    )

    def watch() -> None:
        status = transport._proc.wait()
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(transport._process_exited, status)

    threading.Thread(target=watch, daemon=True).start()
    await ready
    return transport, protocol


def _name(command: list[str]) -> None:
    """Make it the command line that others see, in place of the fork server's."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = map(int, fields[45:47])
    line = b"\0".join(map(os.fsencode, command))[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def _place(descriptors: list[int], numbers: list[int], asked: socket.socket) -> None:
    """Give the descriptors their numbers, close the others, and tell who asked."""
    import fcntl

    above = max(numbers) + 1
    high = [fcntl.fcntl(item, fcntl.F_DUPFD_CLOEXEC, above) for item in descriptors]
    answer = fcntl.fcntl(asked.fileno(), fcntl.F_DUPFD_CLOEXEC, above)
    asked.close()
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.write(answer, str(os.getpid()).encode())
    os.close(answer)


def _run(program: Program) -> int:
    """→ the exit status"""
    sys.argv = [program.what if program.kind == "" else program.kind, *program.arguments]
    try:
        if program.kind == "-m":
            sys.modules.pop(program.what, None)
            runpy.run_module(program.what, run_name="__main__", alter_sys=True)
        elif program.kind == "-c":
            sys.modules["__main__"] = module = types.ModuleType("__main__")
            exec(compile(program.what, "<string>", "exec", dont_inherit=True), vars(module))
        else:
            runpy.run_path(program.what, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """As an interpreter ends, but for taking modules apart."""
    import atexit

    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
