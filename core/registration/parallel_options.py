"""Which options of several ranks and engines exclude each other."""

from __future__ import annotations

from ..errors import ConfigError


def parallel_refusal(
    *, tensor: int, pipeline: int, data: int, expert_parallel: bool, has_connector: bool
) -> ConfigError | None:
    """Return the error for options that do not go together, with the name of one; None: they do.

    Sizes are those of tensor, pipeline and data parallelism; `has_connector`: of KV.
    """
    if has_connector and tensor * pipeline > 1:
        return ConfigError(
            "kv_transfer_config: KV connectors serve one rank (tensor_parallel_size 1, "
            "pipeline_parallel_size 1)",
            param="kv_transfer_config",
        )
    if expert_parallel and data > 1 and tensor == 1:
        return ConfigError(
            "enable_expert_parallel: experts are divided among the ranks of each engine "
            "(tensor_parallel_size), not among engines (data_parallel_size)",
            param="enable_expert_parallel",
        )
    return None
