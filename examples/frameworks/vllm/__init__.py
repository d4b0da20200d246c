"""Jackfield under the names by which trainers use vLLM.

For trainers that import `vllm` and would run unchanged: put this folder's parent on `PYTHONPATH`
instead of installing vLLM. It has what TRL uses, and no more; see ../README.md.
"""

from jackfield import LoRARequest, RequestOutput, SamplingParams

from .llm import LLM

__version__ = "0.31.0"
"""The version whose behaviour these names have: trainers ask for it."""
__all__ = ["LLM", "LoRARequest", "RequestOutput", "SamplingParams", "__version__"]
