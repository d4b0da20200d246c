"""The faces: command line, OpenAI server, synchronous LLM."""
