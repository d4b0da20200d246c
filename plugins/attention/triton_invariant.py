"""Attention on a Triton kernel whose result for a query does not depend on the step it is in.

Decode rows, drafts, prompts and their chunks all take the kernel for prompts, with tiles of one
size, which adds a query's keys in order in one program: no sum is split among programs. A decode
row with a long context thus has as many programs as key heads, and takes longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ...core.nn.context import BatchLayout
from ...core.protocols.attention import ProjectedLayer
from .triton import TritonAttention, TritonMetadata

if TYPE_CHECKING:
    from .triton_call import LayerCall


class InvariantTritonAttention(TritonAttention):
    name: ClassVar[str] = "triton_invariant"
    batch_invariant: ClassVar[bool] = True
    compacted_cache: ClassVar[bool] = False
    leveled_cache: ClassVar[bool] = False
    portable: ClassVar[bool] = True

    def build_metadata(self, layout: BatchLayout) -> TritonMetadata:
        return TritonMetadata(layout, 0)

    def least_shared_prefix(self, num_rows: int) -> None:
        return None

    def plan_projection(self, layer: ProjectedLayer) -> None:
        return None

    def attend(self, call: LayerCall, metadata: TritonMetadata) -> None:
        call.prefill(call.layout.max_query_len, uniform=True)
