"""Which options of several ranks and engines exclude each other."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..errors import ConfigError

IN_PLACE = ("allgather_reducescatter", "naive")
"""vLLM's names of `EngineConfig.all2all_backend` for what ranks that divide the layers do anyway:
each has all tokens, and one sum adds what experts compute. The first one is the default."""


class EPLBConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How experts are placed by load: `EngineConfig.eplb_config`. Names are vLLM's."""

    window_size: Annotated[
        int, Meta(description="Steps whose tokens are counted before experts move.", ge=1)
    ] = 1000
    step_interval: Annotated[
        int, Meta(description="Steps from one move of experts to the next.", ge=1)
    ] = 3000
    num_redundant_experts: Annotated[
        int, Meta(description="Copies of a layer's experts, beyond one each, of all ranks.", ge=0)
    ] = 0


def layer_partition(value: Any) -> Any:
    """Return `EngineConfig.pipeline_layer_partition` as a tuple of numbers, from one, from a list
    of them, or from text, as VLLM_PP_LAYER_PARTITION has it ("10,11,11"); anything else as it is.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple):
        return value
    parts = [
        part for word in words for part in (word.split(",") if isinstance(word, str) else [word])
    ]
    numbers = [part.strip() if isinstance(part, str) else part for part in parts]
    return tuple(int(n) if isinstance(n, str) and n.isdecimal() else n for n in numbers)


def parallel_refusal(
    *,
    tensor: int,
    pipeline: int,
    layer_partition: tuple[int, ...] | None,
    data: int,
    expert_parallel: bool,
    all2all: str,
    eplb: EPLBConfig | None,
) -> ConfigError | None:
    """Return the error for options that do not go together, with the name of one; None: they do.

    Sizes are those of tensor, pipeline and data parallelism; `layer_partition`: layers
    of each stage; `all2all`: the backend's name; `eplb`: None if experts stay.
    """
    if layer_partition is not None and len(layer_partition) != pipeline:
        return ConfigError(
            f"pipeline_layer_partition: it has layers of {len(layer_partition)} stages, and "
            f"pipeline_parallel_size is {pipeline}",
            param="pipeline_layer_partition",
        )
    if all2all not in IN_PLACE and not expert_parallel:
        return ConfigError(
            f"all2all_backend: {all2all!r} exchanges tokens between ranks that hold experts whole: "
            "it needs enable_expert_parallel",
            param="all2all_backend",
        )
    if expert_parallel and data > 1 and tensor == 1:
        return ConfigError(
            "enable_expert_parallel: experts are divided among the ranks of each engine "
            "(tensor_parallel_size), not among engines (data_parallel_size)",
            param="enable_expert_parallel",
        )
    if eplb is not None and not (expert_parallel and tensor > 1):
        return ConfigError(
            "enable_eplb: experts move between ranks that hold them whole: it needs "
            "enable_expert_parallel and a tensor_parallel_size above 1",
            param="enable_eplb",
        )
    if eplb is not None and pipeline > 1:
        return ConfigError(
            "enable_eplb: experts of stages (pipeline_parallel_size) do not move yet",
            param="enable_eplb",
        )
    return None
