"""Command-line flags of engine and server, shared by all commands."""
