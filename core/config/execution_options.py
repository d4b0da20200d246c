"""How steps are computed: drafts, attention, operations, quantization and CUDA graphs."""

from __future__ import annotations

from typing import Annotated

from .annotations import doc
from .media_options import MediaOptions
from .speculative_config import SpeculativeConfig


class ExecutionOptions(MediaOptions, frozen=True, kw_only=True):
    """How steps are computed: drafts, attention, operations, quantization and CUDA graphs."""

    speculative_config: Annotated[
        SpeculativeConfig | None,
        doc(
            "Speculative decoding: method (a speculator by name), model (a draft checkpoint), "
            "num_speculative_tokens, and the speculator's own options beside them; default: none."
        ),
    ] = None
    attention_backend: Annotated[
        str, doc("Attention backend by name, here or in vLLM (TRITON_ATTN), or auto.")
    ] = "auto"
    operations: Annotated[
        str, doc("Implementation of norms, products and activations by name, or auto.")
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        doc(
            "Give a request the same tokens and log-probabilities, bit for bit, whatever other "
            "requests run: with operations and attention that add in one order, and are slower."
        ),
    ] = False
    quantization: Annotated[
        str | None,
        doc("Quantization method by name; default: what the checkpoint says, or none."),
    ] = None
    enforce_eager: Annotated[bool, doc("Never record CUDA graphs of decode steps.")] = False
    enable_layerwise_nvtx_tracing: Annotated[
        bool,
        doc(
            "NVTX ranges of steps and modules, for Nsight Systems; recorded steps have their own "
            "range alone (see enforce_eager)."
        ),
    ] = False
    enable_sleep_mode: Annotated[
        bool,
        doc(
            "On a GPU: let weights and caches keep their addresses over a sleep, so that steps may "
            "be recorded. A CPU's always do."
        ),
    ] = False
