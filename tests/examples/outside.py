"""A fresh virtual environment beside the one that runs the tests: what a stranger would have."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jackfield

ROOT = Path(jackfield.__file__).resolve().parent
NO_SOURCE = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "__pycache__", "tests", "docs"
)


class Outside:
    """The environment, with Jackfield installed from its wheel. Nothing is downloaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        venv.create(folder / "venv", with_pip=False)
        (packages,) = (folder / "venv").glob("lib/python*/site-packages")
        # Dependencies are borrowed. Paths in a .pth file are not searched for further .pth files,
        # so an editable Jackfield of the running environment stays there.
        self.borrowed = [p for p in sys.path if p.endswith("-packages") and Path(p).is_dir()]
        (packages / "borrowed.pth").write_text("\n".join(self.borrowed) + "\n")
        for name, argv in {
            "pip": (sys.executable, "-m", "pip", "--python", str(self.bin / "python")),
            "pytest": (str(self.bin / "python"), "-m", "pytest"),
        }.items():
            script = self.bin / name
            script.write_text(f'#!/bin/sh\nexec {" ".join(argv)} "$@"\n')
            script.chmod(0o755)
        names = ("HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
        self.environment = {
            **{name: os.environ[name] for name in names if name in os.environ},
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # Hypothesis' tables, which it would make in each folder; a plugin that nobody uses.
            "HYPOTHESIS_STORAGE_DIRECTORY": str(Path.cwd() / ".hypothesis"),
            "PYTEST_ADDOPTS": "-p no:schemathesis",
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_COMPILE": "1",  # What is imported is compiled then.
        }
        copy = folder / "jackfield"
        shutil.copytree(ROOT, copy, ignore=NO_SOURCE)
        self.install(self.wheel(copy))

    def run(self, *argv: str, cwd: Path | None = None, check: bool = True) -> str:
        """→ what the command prints. Raises AssertionError with all of it where it fails."""
        completed = subprocess.run(
            argv, cwd=cwd or self.folder, env=self.environment, text=True, timeout=600,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert not check or completed.returncode == 0, f"{' '.join(argv)}\n{completed.stdout}"
        return completed.stdout

    def wheel(self, source: Path) -> Path:
        """Build the wheel of a project's folder, which it may litter."""
        into = self.folder / "wheels" / source.name
        self.run("pip", "wheel", "--quiet", "--wheel-dir", str(into), str(source))
        (built,) = into.glob("*.whl")
        return built

    def install(self, *wheels: Path) -> None:
        """Also where the borrowed packages have the same version of it: those stay as they are."""
        self.run("pip", "install", "--quiet", "--ignore-installed", *map(str, wheels))

    def uninstall(self, *distributions: str) -> None:
        self.run("pip", "uninstall", "--quiet", "--yes", *distributions)

    def plugins(self) -> list[dict[str, str]]:
        """What `jackfield plugins` lists, nothing imported: names and hooks, and plugins that were
        left out. (What is said of plugins as a whole has times in it.)"""
        rows: list[dict[str, str]] = json.loads(
            self.run("jackfield", "plugins", "--json", "--no-check")
        )
        return [
            row for row in rows if row["kind"] != "plugin" or row["status"].startswith("left out")
        ]

    @contextlib.contextmanager
    def serving(self, *flags: str) -> Iterator[str]:
        """`jackfield serve` on a free port; → its URL."""
        log = self.folder / "server.log"
        with log.open("w") as errors, subprocess.Popen(
            ["jackfield", "serve", *flags, "--port", "0", "--device", "cpu"],
            cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=errors,
        ) as process:  # fmt: skip
            late = threading.Timer(600, process.kill)
            late.start()
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                match = re.search(r"http://127\.0\.0\.1:\d+", line)
                assert match is not None, f"{flags}: {line}{log.read_text()}"
                yield match[0]
            finally:
                late.cancel()
                process.terminate()
                try:
                    process.wait(300)
                finally:
                    process.kill()


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """GET, or POST where there is a body; → the answer's JSON. Raises HTTPError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def names_of(rows: Sequence[dict[str, str]], distribution: str) -> dict[str, str]:
    """Kind → the name that a distribution has registered, for rows of `jackfield plugins`."""
    return {row["kind"]: row["name"] for row in rows if row["distribution"] == distribution}
