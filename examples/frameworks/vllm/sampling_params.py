"""Sampling parameters, where vLLM has them."""

from jackfield import OutputKind as RequestOutputKind
from jackfield import SamplingParams, StructuredOutputsParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
