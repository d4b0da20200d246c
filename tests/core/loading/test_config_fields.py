"""Any value in any field of a config.json: served, or refused by Jackfield, with file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield.core.config import EngineConfig
from jackfield.core.engine.resolve_config import resolve_config, resolve_runner
from jackfield.core.errors import ConfigError, JackfieldError
from jackfield.core.loading.build import build_model
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.registry import Plugins, load_plugins

from helpers import make_checkpoint

FAMILIES = ("llama", pytest.param("gemma3", marks=pytest.mark.slow), "mixtral")
ODD: list[Any] = [
    "x", -1, 0, 2.5, 1e400, float("nan"), True, [], ["a"], [1.5], {"a": 1},
    {"factor": "x", "rope_type": "yarn"}, {"rope_type": "yarn"},
    {"rope_type": "linear", "factor": -3}, {"rope_type": "linear", "factor": 0},
    {"rope_type": "nope"}, {"full_attention": 5},
    {"full_attention": {"rope_type": "linear", "factor": []}},
]  # fmt: skip
MORE = (
    "architectures", "rope_scaling", "rope_parameters", "rope_theta", "sliding_window",
    "layer_types", "head_dim", "quantization_config", "eos_token_id", "id2label", "dtype",
)  # fmt: skip


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def build(folder: Path, plugins: Plugins, changes: dict[str, Any]) -> None:
    """Everything that a start does with config.json, but for the weights."""
    file = folder / "config.json"
    original_text = file.read_text()
    file.write_text(json.dumps(json.loads(original_text) | changes))
    try:
        engine_config = EngineConfig(
            model=str(folder), device="cpu", load_format="dummy", skip_tokenizer_init=True
        )
        config = resolve_config(engine_config, plugins)
        config, model_config = resolve_runner(
            engine_config, config, resolve_model_config(config), plugins
        )
        operations = plugins["operations"].load("torch")()
        with torch.inference_mode():
            build_model(plugins, config, model_config, torch.device("cpu"), operations)
    finally:
        file.write_text(original_text)


def test_no_value_of_any_field_is_a_bare_error(checkpoint: Path, plugins: Plugins) -> None:
    build(checkpoint, plugins, {})
    refused = 0
    names = {*json.loads((checkpoint / "config.json").read_text()), *MORE}
    for name in sorted(names):
        for odd in ODD:
            try:
                build(checkpoint, plugins, {name: odd})
            except JackfieldError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{name}: {odd!r}: {type(error).__name__}: {error}") from error
    assert refused > 100
    build(checkpoint, plugins, {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_scaling", {"rope_type": "linear", "factor": "x"}),
        ("rope_scaling", {"type": "yarn", "factor": 0}),
        ("rope_parameters", {"rope_type": 5}),
        ("rope_parameters", {"full_attention": {"factor": None, "rope_theta": "x"}}),
        ("architectures", {"a": 1}),
        ("architectures", [5]),
        ("num_hidden_layers", "2"),
        ("rms_norm_eps", "small"),
        ("tie_word_embeddings", "yes"),
        ("max_position_embeddings", 2.5),
        ("eos_token_id", ["x"]),
        ("layer_types", "full_attention"),
    ],
)
def test_a_wrong_value_is_refused_with_the_files_and_the_fields_name(
    checkpoint: Path, plugins: Plugins, field: str, value: Any
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(checkpoint, plugins, {field: value})
    assert str(checkpoint / "config.json") in caught.value.message
    assert field in caught.value.message
