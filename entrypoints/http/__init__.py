"""Plain HTTP: bodies, connections, authentication, pacing, server-sent events."""
