"""Entry points: command line, HTTP server, synchronous LLM."""
