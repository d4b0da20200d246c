"""Fields of config.json that families with mixtures of experts share."""

from __future__ import annotations

from ...core.protocols.field_kinds import (
    FLAG,
    INTEGER,
    INTEGERS,
    NUMBER,
    SIZE,
    SIZE_OR_ZERO,
    FieldKind,
)

EXPERTS: dict[str, FieldKind] = {
    "moe_intermediate_size": SIZE,
    "norm_topk_prob": FLAG,
    "num_experts": SIZE,
    "num_experts_per_tok": SIZE,
    # Hybrid models say of an MLP that it has no experts.
    "num_local_experts": SIZE_OR_ZERO,
}
SPARSE_LAYERS: dict[str, FieldKind] = {
    "decoder_sparse_step": INTEGER,
    "mlp_only_layers": INTEGERS,
}
"""Which layers have a mixture, in Qwen's fields."""
DEEPSEEK_EXPERTS: dict[str, FieldKind] = EXPERTS | {
    "first_k_dense_replace": INTEGER,
    "n_group": INTEGER,
    "n_routed_experts": SIZE,
    "n_shared_experts": SIZE_OR_ZERO,
    "num_nextn_predict_layers": INTEGER,
    "num_shared_experts": SIZE_OR_ZERO,
    "routed_scaling_factor": NUMBER,
    "topk_group": INTEGER,
}
"""DeepSeek's fields, which other families share."""
