"""Ranks and engines that compute together, and how experts are placed on them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from .annotations import AtLeastOne, doc
from .execution_options import ExecutionOptions

IN_PLACE = ("allgather_reducescatter", "naive")
"""vLLM's names of `EngineConfig.all2all_backend` for what ranks that divide the layers do anyway:
each has all tokens, and one sum adds what experts compute. The first one is the default."""


class EPLBConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How experts are placed by load: `EngineConfig.eplb_config`. Names are vLLM's."""

    window_size: Annotated[
        int, doc("Steps whose tokens are counted before experts move.", ge=1)
    ] = 1000
    step_interval: Annotated[int, doc("Steps from one move of experts to the next.", ge=1)] = 3000
    num_redundant_experts: Annotated[
        int, doc("Copies of a layer's experts, beyond one each, of all ranks.", ge=0)
    ] = 0


class ParallelOptions(ExecutionOptions, frozen=True, kw_only=True):
    """Ranks and engines that compute together, and how experts are placed on them."""

    executor: Annotated[
        str,
        doc(
            "Where ranks run: inprocess (one; uni is the same), processes (one or several of this "
            "host and of nnodes; mp is the same), ray (on hosts of a Ray cluster), a plugin's, or "
            "auto, by their number."
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int, doc("GPUs that share each layer: ranks, each with a process of its own.", ge=1)
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        doc(
            "Divide a mixture's experts whole among the ranks of all engines (tensor_parallel_size "
            "times data_parallel_size), instead of each expert; with one rank nothing is divided."
        ),
    ] = False
    all2all_backend: Annotated[
        str,
        doc(
            "How tokens come to the ranks that hold their experts, with enable_expert_parallel: "
            "allgather_reducescatter or naive (each rank has all tokens, and one sum adds what "
            "experts compute; among engines, the first that works here), all_to_all (tokens are "
            "exchanged by torch.distributed), or a plugin's."
        ),
    ] = IN_PLACE[0]
    enable_eplb: Annotated[
        bool,
        doc(
            "With enable_expert_parallel: count the tokens that choose each expert, and move "
            "experts between ranks so that each computes about as many."
        ),
    ] = False
    eplb_config: Annotated[
        EPLBConfig,
        doc("How experts are placed by load: window_size, step_interval, num_redundant_experts."),
    ] = EPLBConfig()
    pipeline_parallel_size: Annotated[
        int,
        doc(
            "Stages that each hold some of the layers, on tensor_parallel_size GPUs of its own: "
            "as many steps are in flight.",
            ge=1,
        ),
    ] = 1
    pipeline_layer_partition: Annotated[
        tuple[AtLeastOne, ...] | None,
        doc(
            "Layers of each stage of pipeline_parallel_size, from the first, such as 10,11,11; "
            "default: as evenly as possible."
        ),
    ] = None
    data_parallel_size: Annotated[
        int,
        doc(
            "Engines with the same model behind one server, each on tensor_parallel_size * "
            "pipeline_parallel_size GPUs of its own; a request runs on one of them.",
            ge=1,
        ),
    ] = 1
    nnodes: Annotated[
        int,
        doc(
            "Hosts among which the ranks are divided, without a Ray cluster: the engine is on the "
            "first, and `jackfield serve --headless --node-rank N` runs on the others.",
            ge=1,
        ),
    ] = 1
    master_addr: Annotated[
        str, doc("Address of the first of nnodes hosts, at which the others reach it.")
    ] = "127.0.0.1"
    master_port: Annotated[int, doc("Its port for them.", ge=1, le=65535)] = 29501
    master_secret_file: Annotated[
        str | None,
        doc(
            "File with a secret that all of nnodes hosts have, of 16 bytes at least, such as "
            "`openssl rand -hex 32` writes: who does not know it is no rank."
        ),
    ] = None
    collectives: Annotated[
        str,
        doc("How ranks exchange tensors: peer_memory, nccl, gloo, a plugin's; auto: by device."),
    ] = "auto"
    distributed_timeout_seconds: Annotated[
        float, doc("Seconds that a rank waits for the others.", gt=0.0, le=1e6)
    ] = 600.0
    rank_timeout: Annotated[
        float,
        doc(
            "Seconds without a sign of life of a rank, or without progress of any rank in a step, "
            "after which an engine of several ranks ends; to compile kernels is progress, and a "
            "step with prompts may take as long again for every 8192 tokens. 0: never.",
            ge=0.0,
            le=1e6,
        ),
    ] = 8.0


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
