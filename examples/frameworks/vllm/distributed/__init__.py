"""What spans processes, where vLLM has it."""
