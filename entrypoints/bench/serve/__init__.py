"""`jackfield bench serve`: load on any OpenAI-style server."""
