"""Torch's files are read as tensors alone; optional packages are asked for by name; a bar shows on
terminals."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from jackfield import EngineConfig
from jackfield.core.errors import ConfigError, LoadError
from jackfield.core.loading.build import build_model
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.nn.operations import Operations
from jackfield.core.registry import load_plugins
from jackfield.entrypoints.cli.main import main
from jackfield.plugins.loaders import files
from jackfield.plugins.loaders.pt import PtLoader
from jackfield.plugins.loaders.runai_streamer import RunaiStreamerLoader
from jackfield.plugins.loaders.safetensors import checkpoint_files

from helpers import make_checkpoint


class Folder:
    """What a loader reads of the model's configuration."""

    def __init__(self, path: Path) -> None:
        self.path = path


class Model(torch.nn.Module):
    weight_map: Any

    def __init__(self) -> None:
        from jackfield.core.loading.weight_map import WeightMap

        super().__init__()
        self.weight_map = WeightMap()
        self.weight = torch.nn.Parameter(torch.zeros(2))


class Harmful:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def load(folder: Path) -> Model:
    model = Model()
    PtLoader(EngineConfig(), Folder(folder)).load(model, torch.device("cpu"))  # type: ignore
    return model


def test_a_pickle_that_does_anything_is_refused_and_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    torch.save({"weight": torch.ones(2), "more": Harmful(trace)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match="cannot be read as tensors alone"):
        load(tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize("content", [[torch.ones(2)], {"weight": [1.0, 2.0]}, {1: torch.ones(2)}])
def test_other_contents_than_named_tensors_are_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match="not a mapping from names to tensors"):
        load(tmp_path)


def test_what_training_left_beside_the_weights_is_not_read(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "a.bin")
    torch.save({"step": 1}, tmp_path / "training_args.bin")
    assert load(tmp_path).weight.tolist() == [1.0, 1.0]


@pytest.mark.skipif(
    importlib.util.find_spec("runai_model_streamer") is not None, reason="the package is installed"
)
def test_a_missing_package_is_named() -> None:
    with pytest.raises(ConfigError, match="pip install runai-model-streamer") as caught:
        RunaiStreamerLoader(EngineConfig(), Folder(Path()))  # type: ignore[arg-type]
    assert caught.value.param == "load_format"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_far_loading_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [tmp_path / "a", tmp_path / "b"]
    for part, size in zip(parts, (10, 30), strict=True):
        part.write_bytes(bytes(size))
    for stream, lines in ((Terminal(), ["0 %", "25 %", "50 %", "100 %"]), (io.StringIO(), [])):
        monkeypatch.setattr("sys.stderr", stream)
        with files.Bar.of(parts) as bar:
            bar.add(10)
            bar.add(10)
        texts = stream.getvalue().split("\r")[1:]
        assert len(texts) == len(lines)
        assert all(line in text for line, text in zip(lines, texts, strict=True))


def test_a_load_that_fails_leaves_its_bar_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with pytest.raises(LoadError), files.Bar(100) as bar:
        bar.add(30)
        raise LoadError("no more")
    assert "30 %" in stream.getvalue() and "100 %" not in stream.getvalue()


@pytest.mark.parametrize("load_format", ["auto", "pt", "dummy", "sharded_state"])
def test_loaders_show_a_bar(
    load_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("llama", tmp_path / "model")
    if load_format == "pt":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    if load_format == "sharded_state":
        folder = tmp_path / "divided"
        assert main(["convert", "--model", str(tmp_path / "model"), "-o", str(folder)]) == 0
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    config = EngineConfig(model=str(folder), device="cpu", load_format=load_format)
    cpu = torch.device("cpu")
    build_model(load_plugins(), config, resolve_model_config(config), cpu, Operations())
    texts = stream.getvalue().split("\r")
    assert len(texts) > 5 and " 0 %" in texts[1] and "100 %" in texts[-1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: file.symlink_to("blobs/gone"), "is a link to blobs/gone, which is missing"),
        (lambda file: file.mkdir(), "is no file"),
    ],
    ids=["a download that was broken off", "a folder"],
)
def test_what_is_no_file_is_refused_by_its_name(make: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(LoadError, match=rf"model-00001-of-00002\.safetensors {message}"):
        checkpoint_files(tmp_path)
