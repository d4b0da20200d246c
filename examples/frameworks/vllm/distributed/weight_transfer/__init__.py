"""The sending side of weight updates, where vLLM has it."""
