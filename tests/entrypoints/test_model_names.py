"""What `jackfield serve MODEL` takes for a model, and how it refuses the rest: exit status 2."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import forked
import pytest

from jackfield.core.config import EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.entrypoints.cli.main import main


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("owner/name", "owner/name", None),
        ("owner/name@v1.0", "owner/name", "v1.0"),
        ("owner/name@refs/pr/3", "owner/name", "refs/pr/3"),
        ("hf://owner/name", "owner/name", None),
        ("hf://Owner-1/Qwen3-0.6B@main", "Owner-1/Qwen3-0.6B", "main"),
        ("https://huggingface.co/owner/name", "owner/name", None),
        ("https://huggingface.co/owner/name/", "owner/name", None),
        ("https://huggingface.co/owner/name/tree/v1", "owner/name", "v1"),
        ("https://huggingface.co/owner/name?library=vllm", "owner/name", None),
        ("https://hf.co/owner/name", "owner/name", None),
        ("file:///data/model", "/data/model", None),
        ("/data/model@v1", "/data/model@v1", None),
        ("./owner:name", "./owner:name", None),
    ],
)
def test_the_hub_s_names_are_read(text: str, repo: str, revision: str | None) -> None:
    config = EngineConfig(model=text, tokenizer=text)
    assert (config.model, config.revision) == (repo, revision)
    assert (config.tokenizer, config.tokenizer_revision) == (repo, revision)
    assert config.served_names == (repo,)


def test_a_folder_that_looks_like_one_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "name@v1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert EngineConfig(model="owner/name@v1").model == "owner/name@v1"


def test_a_revision_is_given_once() -> None:
    assert EngineConfig(model="hf://owner/name", revision="v2").revision == "v2"
    assert EngineConfig(model="owner/name@v2", revision="v2").revision == "v2"
    with pytest.raises(ConfigError, match="names another revision than 'v1'") as caught:
        EngineConfig(model="owner/name@v2", revision="v1")
    assert caught.value.param == "revision"


NOT_FROM_THERE = ("it must be a folder here, or a name on the Hugging Face hub", "hf://owner/name")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("s3://bucket/model", ("has not been fetched, and HF_HUB_OFFLINE is set",)),
        ("gs://bucket/model", ("has not been fetched, and HF_HUB_OFFLINE is set",)),
        ("s3://bucket/../model", ("is not the address of a folder",)),
        ("https://example.com/owner/name", NOT_FROM_THERE),
        ("https://huggingface.co/owner/name/blob/main/x.gguf", NOT_FROM_THERE),
        ("https://huggingface.co/owner", NOT_FROM_THERE),
        ("hf://owner", NOT_FROM_THERE),
        ("hf://", NOT_FROM_THERE),
        ("owner/GGUF:Q4_K_M", ("*.gguf of Q4_K_M", "--load-format", "config.json")),
        ("hf://owner/GGUF:Q4_K_M", ("*.gguf of Q4_K_M", "--load-format", "config.json")),
        ("/no/such/folder", ("neither a folder here nor a hub name",)),
        ("a/b/c", ("neither a folder here nor a hub name",)),
        ("~nobody-here/x", ("neither a folder here nor a hub name",)),
        ("x" * 5000, ("neither a folder here nor a hub name",)),
        ("FILE", ("is a file; name the folder",)),
        ("EMPTY", ("has no config.json",)),
        ("NO WEIGHTS", ("no *.safetensors in",)),
        ("NO ARCHITECTURE", ("UnheardOfForCausalLM",)),
    ],
)
def test_no_model_is_a_wrong_configuration(
    model: str, says: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if model == "FILE":
        (tmp_path / "model.gguf").touch()
        model = str(tmp_path / "model.gguf")
    elif model.isupper():
        config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
        if model == "NO ARCHITECTURE":
            config["architectures"] = ["UnheardOfForCausalLM"]
        if model != "EMPTY":
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(EMBEDDED_MODEL / file, tmp_path)
            (tmp_path / "config.json").write_text(json.dumps(config))
        model = str(tmp_path)
    assert main(["serve", model, "--port", "0", "--device", "cpu"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("jackfield: configuration error: model: ")
    for part in says:
        assert part in line


def test_a_hub_s_name_is_found_in_its_cache(tmp_path: Path) -> None:
    """Without a network, as `HF_HUB_OFFLINE=1` finds what was fetched before."""
    cached = tmp_path / "models--owner--name"
    commit = "1234567890123456789012345678901234567890"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "v1").write_text(commit)
    shutil.copytree(EMBEDDED_MODEL, cached / "snapshots" / commit)
    code = (
        "import sys\nfrom jackfield.core.config import EngineConfig\n"
        "from jackfield.core.loading.model_config import resolve_model_config\n"
        "for model in sys.argv[1:]:\n"
        "    print(resolve_model_config(EngineConfig(model=model)).path.name)"
    )
    names = ("owner/name@v1", "hf://owner/name@v1", "https://huggingface.co/owner/name/tree/v1")
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    completed = forked.run(
        [sys.executable, "-c", code, *names], env=environment, capture_output=True, text=True
    )
    assert completed.stdout.split() == [commit] * len(names), completed.stderr


def test_no_advice_where_none_helps(capsys: pytest.CaptureFixture[str]) -> None:
    """With the KV cache of not even one block, a shorter context does not fit either."""
    argv = ["serve", "--port", "0", "--device", "cpu", "--cpu-kvcache-space"]
    assert main([*argv, "0.0001"]) == 1
    error = capsys.readouterr().err
    assert "raise --cpu-kvcache-space" in error and "at most" not in error
    assert "gets 0.0001 GiB" in error
    assert main([*argv, "0.005"]) == 1
    error = capsys.readouterr().err
    assert "lower --max-model-len (at most " in error and "at most 0 " not in error
