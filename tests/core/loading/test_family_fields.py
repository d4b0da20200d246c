"""A family declares its own fields of config.json beside itself: nothing in core names them."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import CONFIG_MAPPING, LlamaConfig

import jackfield
from jackfield import hookimpl
from jackfield.core.config import EngineConfig
from jackfield.core.errors import ConfigError, PluginError
from jackfield.core.loading.config_fields import SHARED
from jackfield.core.loading.model_config import ModelConfig, resolve_model_config
from jackfield.core.protocols.field_kinds import (
    COUNT,
    FLAG,
    NUMBERS,
    POSITIVE,
    POSITIVE_OR_LIST,
    SIZE,
    TEXT,
    FieldKind,
    declared_fields,
)
from jackfield.core.registry import Plugins, load_plugins
from jackfield.plugins.models.decoder import CausalLM

from helpers import make_checkpoint

CORE = Path(jackfield.__path__[0]) / "core"


class LoopedLM(CausalLM):
    """An outside family over a configuration of `transformers`."""

    config_fields: ClassVar[dict[str, FieldKind]] = {
        "num_loops": SIZE,
        "loop_gate": FLAG.not_null(),
        "loop_weights": NUMBERS,
        "rope_theta": POSITIVE_OR_LIST,
    }

    def __init__(self, *args: Any) -> None:
        raise AssertionError("nothing is built from a refused configuration")


class GatedLoopedLM(LoopedLM):
    """One that adds a field to its base's."""

    config_fields = {"gate_scale": POSITIVE}


class LoopedConfig:
    """An outside family with a configuration class of its own."""

    config_fields: ClassVar[dict[str, FieldKind]] = {
        "loops": COUNT.required(),
        "loop_gate": FLAG,
        "loop_kind": TEXT,
    }

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        assert type(config_dict["loops"]) is int, "it was checked"
        return LlamaConfig(**config_dict)


class Family:
    jackfield_api = 3

    @hookimpl
    def register_models(self, registry: Any) -> None:
        registry.add("LoopedLM", LoopedLM)
        registry.add("GatedLoopedLM", GatedLoopedLM)

    @hookimpl
    def register_configs(self, registry: Any) -> None:
        registry.add("looped", LoopedConfig)


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins(extra=[Family()])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def resolve(folder: Path, config: dict[str, Any], plugins: Plugins) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return resolve_model_config(EngineConfig(model=str(folder), device="cpu"), plugins)


LOOPED = {"architectures": ["LoopedLM"]}
GATED = {"architectures": ["GatedLoopedLM"]}
TYPED = {"architectures": ["LoopedLM"], "model_type": "looped", "loops": 2}


@pytest.mark.parametrize(
    ("family", "field", "value", "reason"),
    [
        (LOOPED, "num_loops", "x", "num_loops must be an integer, got 'x'"),
        (LOOPED, "num_loops", 0, "has num_loops 0, which is no size of a model"),
        (LOOPED, "num_loops", 2**40, "has num_loops 1099511627776, which is no size of a model"),
        (LOOPED, "loop_gate", 1, "loop_gate must be true or false, got 1"),
        (LOOPED, "loop_gate", None, "loop_gate must be true or false, got None"),
        (LOOPED, "loop_weights", [1, None], "loop_weights must be a list of numbers, got"),
        (LOOPED, "rope_theta", [1.0, 0], "rope_theta must be positive, got"),
        (GATED, "num_loops", [], "num_loops must be an integer, got []"),
        (GATED, "gate_scale", -1.5, "gate_scale must be positive, got -1.5"),
        (TYPED, "loops", None, "loops must be an integer of at least 1, got None"),
        (TYPED, "loops", 0, "loops must be an integer of at least 1, got 0"),
        (TYPED, "loop_kind", {}, "loop_kind must be a text, got {}"),
        (TYPED, "num_loops", "x", "num_loops must be an integer, got 'x'"),
    ],
)
def test_a_value_of_a_familys_own_field_is_refused_by_its_name(
    family: dict[str, Any],
    field: str,
    value: Any,
    reason: str,
    llama: dict[str, Any],
    plugins: Plugins,
    tmp_path: Path,
) -> None:
    config = llama | family
    resolve(tmp_path, config, plugins)
    with pytest.raises(ConfigError) as caught:
        resolve(tmp_path, config | {field: value}, plugins)
    assert str(tmp_path / "config.json") in caught.value.message
    assert reason in caught.value.message and caught.value.param == "model"


def test_a_field_that_a_file_must_have_is_missed_by_its_name(
    llama: dict[str, Any], plugins: Plugins, tmp_path: Path
) -> None:
    config = llama | {name: value for name, value in TYPED.items() if name != "loops"}
    with pytest.raises(ConfigError, match="loops must be an integer of at least 1, got None"):
        resolve(tmp_path, config, plugins)


def test_a_familys_kind_comes_before_cores_and_a_configurations_before_its_models(
    llama: dict[str, Any], plugins: Plugins, tmp_path: Path
) -> None:
    """`rope_theta` may be a list for this family, and `loop_gate` null for this type."""
    listed = {"rope_theta": [1e4, 1e5], "rope_scaling": None, "rope_parameters": None}
    with pytest.raises(ConfigError, match="rope_theta must be a number, got"):
        resolve(tmp_path, llama | listed, plugins)
    resolve(tmp_path, llama | LOOPED | listed, plugins)
    resolve(tmp_path, llama | TYPED | {"loop_gate": None}, plugins)


def test_a_declaration_of_something_else_is_refused(llama: dict[str, Any], tmp_path: Path) -> None:
    class Odd(CausalLM):
        config_fields: ClassVar[Any] = {"num_loops": int}

    class Plugin:
        jackfield_api = 3

        @hookimpl
        def register_models(self, registry: Any) -> None:
            registry.add("Odd", Odd)

    with pytest.raises(PluginError, match="config_fields has no FieldKind for num_loops"):
        resolve(tmp_path, llama | {"architectures": ["Odd"]}, load_plugins(extra=[Plugin()]))


def test_the_context_length_is_what_the_class_says(llama: dict[str, Any], tmp_path: Path) -> None:
    class Long(CausalLM):
        @classmethod
        def context_length(cls, hf_config: Any) -> int | None:
            return getattr(hf_config, "longest_text", None)

    class Plugin:
        jackfield_api = 3

        @hookimpl
        def register_models(self, registry: Any) -> None:
            registry.add("Long", Long)

    plugins = load_plugins(extra=[Plugin()])
    config = llama | {"architectures": ["Long"]}
    assert resolve(tmp_path, config | {"longest_text": 77}, plugins).max_model_len == 77
    assert resolve(tmp_path, config, plugins).max_model_len == 2048


def test_the_vocabulary_is_what_the_class_says(llama: dict[str, Any], tmp_path: Path) -> None:
    """End tokens that it lacks are never generated."""

    class Short(CausalLM):
        @classmethod
        def vocabulary_size(cls, hf_config: Any) -> int:
            return int(hf_config.known_tokens)

    class Plugin:
        jackfield_api = 3

        @hookimpl
        def register_models(self, registry: Any) -> None:
            registry.add("Short", Short)

    plugins = load_plugins(extra=[Plugin()])
    fields = {"architectures": ["Short"], "known_tokens": 50, "eos_token_id": [49, 50]}
    config = resolve(tmp_path, llama | fields, plugins)
    assert config.vocab_size == 50 and config.eos_token_ids == {49}


# ---------------------------------------------------------------- names in core


COMMON = 50
"""Model types of `transformers` that have a field of all families, at least."""
OF_ANY = {
    "layer_norm_epsilon", "partial_rotary_factor", "quantization_config", "rope_scaling",
    "rope_theta", "torch_dtype",
}  # fmt: skip
"""Older spellings of what all families have, and what tools write into any config.json."""
OF_TOOLS = {
    "bad_words_ids", "classifier_from_token", "is_causal", "is_matryoshka",
    "matryoshka_dimensions", "method", "num_labels",
    "sbert_ce_default_activation_function", "sentence_transformers", "use_pad_token",
}  # fmt: skip
"""Of sentence-transformers, of vLLM's `hf_overrides`, and of generation: no family's."""
OF_CORE = {"attention_chunk_size", "language_config", "num_layers", "text_config", "window_size"}
"""Words that have a meaning of their own in core: in `AttentionSpec`, in `ModelConfig`, in the
balance of experts, and where the text part of a multimodal configuration is."""
FAMILY = re.compile("deepseek|gemma|glm|llama(?!3$)|mistral|nemotron|phi3|qwen", re.IGNORECASE)
"""Names of families, but for that of a kind of rope."""
ASKED = re.compile(r'\bhf(?:_config)?\.([a-z]\w*)|getattr\(\s*(?:\w+\.)?hf(?:_config)?,\s*"(\w+)"')


@pytest.fixture(scope="module")
def num_types() -> Counter[str]:
    """How many model types of `transformers` have a field."""
    count: Counter[str] = Counter()
    for name in CONFIG_MAPPING:
        kind = CONFIG_MAPPING[name]
        fields = {field for base in kind.__mro__ for field in vars(base).get("__annotations__", ())}
        count.update(fields | set(getattr(kind, "attribute_map", None) or ()))
    return count


def test_core_checks_only_fields_that_most_families_have(num_types: Counter[str]) -> None:
    assert {name for name in SHARED if num_types[name] < COMMON} == OF_ANY & set(SHARED)
    assert num_types["kv_lora_rank"] < COMMON > num_types["num_experts"]


def test_core_reads_only_fields_that_most_families_have(num_types: Counter[str]) -> None:
    names = {
        name
        for path in CORE.rglob("*.py")
        for groups in ASKED.findall(path.read_text())
        for name in groups
        if name
    }
    assert len(names) > 20
    rare = {name for name in names if num_types[name] < COMMON} - {"pop", "to_dict"}
    assert rare <= OF_ANY | OF_TOOLS


@functools.cache
def words_of_core() -> set[str]:
    """Return the texts and the names of attributes and arguments in its files."""
    found = set()
    for path in CORE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg is not None:
                found.add(node.arg)
    return found


def test_no_field_of_a_single_family_is_named_in_core(plugins: Plugins) -> None:
    families: defaultdict[str, set[str]] = defaultdict(set)
    """Field → modules whose classes declare it."""
    for kind in ("model", "config"):
        for name in plugins[kind]:
            owner = plugins[kind].load(name)
            if owner.__module__.startswith("jackfield.") and name != "*":
                for field in declared_fields(owner).keys() - SHARED.keys():
                    families[field].add(owner.__module__)
    own = {field for field, modules in families.items() if len(modules) == 1}
    assert len(own) > 20 and {"bskcn_1", "loop_num", "total_ut_steps"} <= own
    named = words_of_core()
    assert own & named <= OF_CORE


def test_no_word_of_core_has_the_name_of_a_family() -> None:
    named = {word for word in words_of_core() if word.isidentifier()}
    assert len(named) > 1000
    assert {word for word in named if FAMILY.search(word)} == set()
