"""Files of the tensorizer package, written by it: what is read, what is refused.

Without the package, which needs boto3, redis and others, only the error that names it is tested."""

from __future__ import annotations

import importlib.util
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

from helpers import make_checkpoint

INSTALLED = importlib.util.find_spec("tensorizer") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="the package tensorizer is not installed")


def load(folder: Path, load_format: str = "tensorizer", **options: Any) -> torch.nn.Module:
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", load_format=load_format,
        model_loader_extra_config=options or None,
    )  # fmt: skip
    model_config = resolve_model_config(config)
    return build_model(load_plugins(), config, model_config, torch.device("cpu"), Operations())


def serialize(tensors: dict[str, torch.Tensor], file: Path, **options: Any) -> Path:
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(str(file), **options)
    serializer.write_state_dict(tensors)
    serializer.close()
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint("qwen2", tmp_path / "model")


@pytest.mark.skipif(INSTALLED, reason="the package is installed")
def test_a_missing_package_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="pip install tensorizer") as caught:
        load(folder)
    assert caught.value.param == "load_format"


@needs_package
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_tensors_are_those_that_were_serialized(dtype: torch.dtype, folder: Path) -> None:
    source = folder / "model.safetensors"
    serialize(
        {name: tensor.to(dtype) for name, tensor in load_file(source).items()},
        folder / "model.tensors",
    )
    expected = dict(load(folder, "auto").named_parameters())
    for options in ({}, {"num_readers": 2, "verify_hash": False}):
        for name, parameter in load(folder, **options).named_parameters():
            assert torch.equal(parameter, expected[name].to(dtype).float()), name


@needs_package
def test_a_path_names_the_file(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    other = serialize(tensors, tmp_path / "elsewhere.tensors")
    inside = serialize(tensors, folder / "inside.bin")
    for path in (str(other), inside.name):
        load(folder, tensorizer_uri=path)


@needs_package
def test_encrypted_files_are_refused(folder: Path) -> None:
    pytest.importorskip("libnacl")
    from tensorizer import EncryptionParams

    serialize(
        load_file(folder / "model.safetensors"), folder / "model.tensors",
        encryption=EncryptionParams.random(),
    )  # fmt: skip
    with pytest.raises(LoadError, match=r"model\.tensors cannot be read.* is encrypted"):
        load(folder)


@needs_package
def test_files_of_vllms_own_parameters_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    serialize({**tensors, "_vllm_marker": torch.zeros(1)}, folder / "model.tensors")
    with pytest.raises(LoadError, match="vLLM wrote it of its own parameters"):
        load(folder)


@needs_package
def test_types_that_are_no_numbers_are_refused(folder: Path) -> None:
    """A numpy type of Python's objects would be memory addresses from a file."""
    file = serialize(load_file(folder / "model.safetensors"), folder / "model.tensors")
    data = file.read_bytes()
    assert b"<f4" in data
    file.write_bytes(data.replace(b"<f4", b"|O8"))
    with pytest.raises(LoadError, match="cannot be read by tensorizer"):
        load(folder)


@needs_package
def test_a_changed_number_is_found_by_its_hash(folder: Path) -> None:
    file = serialize(load_file(folder / "model.safetensors"), folder / "model.tensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(LoadError, match="HashMismatch"):
        load(folder)


@needs_package
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tensorizer_uri": "s3://bucket/model.tensors"}, "is a URL"),
        ({"tensorizer_uri": "missing.tensors"}, "there is no file"),
        ({"tensorizer_uri": 3}, "must be a path"),
        ({"num_readers": 0}, "num_readers: must be from 1"),
        ({"num_readers": True}, "num_readers: must be from 1"),
        ({"verify_hash": "yes"}, "verify_hash: must be true or false"),
        ({"encryption_keyfile": "key"}, "has no encryption_keyfile; it takes tensorizer_uri"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: Any, text: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        load(folder, **options)
    assert caught.value.param == "model_loader_extra_config"
