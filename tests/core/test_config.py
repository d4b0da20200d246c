"""Every option refuses nonsense with its own name."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield import EngineConfig
from jackfield.core.errors import ConfigError

NONSENSE: dict[str, list[Any]] = {
    "int": ["many", 1.5],
    "float": ["half"],
    "bool": ["yes", 2],
    "str": [7, ["a"]],
}


def kind(name: str) -> str:
    """The plain kind of an option, from its default; '' when it has none."""
    default = getattr(EngineConfig(), name)
    for made in ("bool", "int", "float", "str"):
        if type(default).__name__ == made:
            return made
    return ""


@pytest.mark.parametrize("name", EngineConfig.__struct_fields__)
def test_an_option_of_a_wrong_type_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: object()})
    assert caught.value.param == name
    assert str(caught.value).startswith(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in EngineConfig.__struct_fields__
        for value in NONSENSE.get(kind(name), [])
    ],
)
def test_nonsense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override"),
        ({"device": "tpu"}, "device"),
        ({"dtype": "float8"}, "dtype"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        (
            {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": 10,
                "max_model_len": 20,
            },
            "max_num_batched_tokens",
        ),
    ],
)
def test_values_out_of_range_or_at_odds_are_refused_by_name(
    options: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    assert caught.value.param == name


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        EngineConfig.from_options({"max_num_seq": 3})
