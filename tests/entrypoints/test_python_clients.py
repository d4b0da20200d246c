"""LangChain and LlamaIndex by their own packages, in environments of their own: what the recipes'
page says runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from serving import running

from jackfield.core.config import EngineConfig

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[2] / "docs/how-to/recipes.md").read_text()
PACKAGES = {"LangChain": "langchain-openai", "LlamaIndex": "llama-index-llms-openai-like"}


@pytest.mark.parametrize("client", PACKAGES)
def test_the_recipe_of_a_client_runs(client: str, tmp_path: Path) -> None:
    section = PAGE.partition(f"### {client}\n")[2].partition("\n### ")[0]
    [program] = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    assert PACKAGES[client] in section
    venv.create(tmp_path / "venv")
    python = str(tmp_path / "venv" / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", PACKAGES[client]]
    done = subprocess.run(install, capture_output=True, text=True, timeout=500)
    if done.returncode:
        pytest.skip(f"pip cannot install {PACKAGES[client]}: {done.stderr[-300:]}")
    config = EngineConfig(device="cpu", served_model_name=("qwen3",), max_num_seqs=2)
    with running(config) as server:
        done = subprocess.run(
            [python, "-c", program.replace("http://127.0.0.1:8000", server.url)],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Hello! How can I help you?" in done.stdout
