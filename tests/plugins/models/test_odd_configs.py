"""No value of a field of a family that `transformers` does not know is a bare error."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_formulas import CASES as FORMULAS
from test_formulas import write_config
from test_renamed_families import CASES as RENAMED

from jackfield.core.errors import ConfigError, JackfieldError
from jackfield.plugins.conformance.kit import Kit
from jackfield.plugins.conformance.paged_model import PagedModel

DROPPED = object()
ODD = (DROPPED, None, 0, -1, "x", [], {}, 1.5)
SAME_ANYWHERE = {"vocab_size", "bos_token_id", "eos_token_id", "initializer_range"}
"""Fields that tests of all families have, or that say nothing of the model."""
FAMILIES = [
    *FORMULAS,
    "TeleChat2ForCausalLM",
    "TeleFLMForCausalLM",
    "SarvamMLAForCausalLM",
    "Param2MoEForCausalLM",
    "MiMoV2ForCausalLM",
]
PARTS = {"Step3p5ForCausalLM": "attention_other_setting"}


def odd_configs(config: dict[str, Any], part: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each field's name, and the configuration with an odd value of it."""
    paths = [(name,) for name in config] + [(part, name) for name in (config[part] if part else ())]
    for path in paths:
        for value in () if path[-1] in SAME_ANYWHERE else ODD:
            odd = copy.deepcopy(config)
            fields = odd if len(path) == 1 else odd[path[0]]
            fields[path[-1]] = value
            if value is DROPPED:
                del fields[path[-1]]
            yield f"{'.'.join(path)}: {value!r}", odd


def build_and_run(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    model = PagedModel(folder, "float32", load_format="dummy", plugins=Kit.plugins())
    model.run({0: [3, 5, 7]})
    model.run({0: [5]})


def config_of(family: str, folder: Path) -> dict[str, Any]:
    if family in FORMULAS:
        write_config(family, folder)
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        return config
    return RENAMED[family].config | {"architectures": [family]}


def count_refused(folder: Path, configs: Iterable[tuple[str, dict[str, Any]]]) -> int:
    """Build and run models of configurations, each described → how many are refused. Raises
    AssertionError for any other error."""
    refused = 0
    for description, config in configs:
        try:
            build_and_run(folder, config)
        except JackfieldError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{description}: {type(error).__name__}: {error}") from error
    return refused


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_value_of_any_field_is_a_bare_error_of_a_family(family: str, tmp_path: Path) -> None:
    config = config_of(family, tmp_path)
    build_and_run(tmp_path, config)
    assert count_refused(tmp_path, odd_configs(config, PARTS.get(family))) > 30


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("ArcticForCausalLM", "num_hidden_layers", None),
        ("ArcticForCausalLM", "intermediate_size", []),
        ("BailingMoeV2_5ForCausalLM", "head_dim", 7),
        ("BailingMoeV2_5ForCausalLM", "partial_rotary_factor", 1.5),
        ("IQuestLoopCoderForCausalLM", "loop_num", 0),
        ("NemotronHPuzzleForCausalLM", "block_configs", [{"block_type": "conv"}]),
        ("NemotronHPuzzleForCausalLM", "block_configs", [{"block_type": "mlp", "n_groups": 4}]),
        ("OuroForCausalLM", "total_ut_steps", "x"),
        ("PanguUltraMoEForCausalLM", "routed_scaling_factor", None),
        ("Plamo3ForCausalLM", "sliding_window_pattern", 0),
        ("Plamo3ForCausalLM", "window_size", "x"),
        ("SolarForCausalLM", "bskcn_3", None),
        ("SolarForCausalLM", "bskcn_tv", [0.9]),
        ("Step3TextForCausalLM", "max_position_embedding", "x"),
        ("Step3TextForCausalLM", "moe_layers_enum", "x"),
        ("Step3p5ForCausalLM", "partial_rotary_factors", [0.5]),
        ("Step3p5ForCausalLM", "moe_top_k", 1.5),
        ("Step1ForCausalLM", "max_seq_len", "x"),
        ("Step1ForCausalLM", "num_attention_groups", 0),
        ("TeleFLMForCausalLM", "mup_scale_factor", 0),
        ("TeleFLMForCausalLM", "output_mult", "x"),
        ("TeleChat2ForCausalLM", "seq_length", "x"),
        ("TeleChat2ForCausalLM", "n_head", None),
    ],
)
def test_an_odd_value_is_refused_by_the_name_of_its_field(
    family: str, field: str, value: Any, tmp_path: Path
) -> None:
    config = config_of(family, tmp_path) | {field: value}
    with pytest.raises(ConfigError, match=field):
        build_and_run(tmp_path, config)


@pytest.mark.parametrize(
    ("field", "value"), [("num_attention_groups", -1), ("num_attention_groups", 4), ("head_dim", 7)]
)
def test_the_other_attention_of_step_has_sizes_too(field: str, value: int, tmp_path: Path) -> None:
    family, part = "Step3p5ForCausalLM", PARTS["Step3p5ForCausalLM"]
    config = config_of(family, tmp_path)
    with pytest.raises(ConfigError, match=rf"{part}\.{field}"):
        build_and_run(tmp_path, config | {part: config[part] | {field: value}})


@pytest.mark.slow
def test_no_value_of_a_layer_of_its_own_is_a_bare_error(tmp_path: Path) -> None:
    config = config_of("NemotronHPuzzleForCausalLM", tmp_path)
    blocks = config["block_configs"]

    def odd_blocks() -> Iterator[tuple[str, dict[str, Any]]]:
        for number, block in enumerate(blocks):
            own = block | {"q_indexer_dim": None}
            if block["block_type"] == "moe":
                own |= {"n_group": 2, "topk_group": 1, "norm_topk_prob": False}
            for what, odd in odd_configs(own, None):
                changed = [*blocks[:number], odd, *blocks[number + 1 :]]
                yield f"{number}.{what}", config | {"block_configs": changed}

    assert count_refused(tmp_path, odd_blocks()) > 80
