"""Ollama's API over the same engine calls as OpenAI's."""
