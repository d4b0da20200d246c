"""The OpenAI-style HTTP server."""
