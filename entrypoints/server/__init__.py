"""The HTTP server: the application, its startup and shutdown, and its own routes."""
