"""Types of options: their bounds and meanings stand in annotations, from which the command line and
the reference page are derived."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

Device = Literal["auto", "cuda", "cpu"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
"""Types of states of sequences."""
ModelDType = Literal["auto", "bfloat16", "float16", "float32", "half", "float"]
"""Types of models."""
DTYPE_SYNONYMS = {"half": "float16", "float": "float32"}
"""vLLM's other names of types."""
KVCacheDType = Literal[
    "auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2",
    "int8", "int8_int4", "int4", "int8_per_token_head",
]  # fmt: skip

AtLeastOne = Annotated[int, Meta(ge=1)]
AtLeastTwo = Annotated[int, Meta(ge=2)]
Bits64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1)]


def doc(text: str, **bounds: Any) -> Any:
    """Return the annotation of an option: its meaning, and bounds as `msgspec.Meta` takes them."""
    return Meta(description=text, **bounds)
