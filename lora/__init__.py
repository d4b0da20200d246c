"""`LoRARequest` where users of vLLM import it from."""
