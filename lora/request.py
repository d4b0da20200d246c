"""`from jackfield.lora.request import LoRARequest`, as from vLLM."""

from ..core.lora_request import LoRARequest

__all__ = ["LoRARequest"]
