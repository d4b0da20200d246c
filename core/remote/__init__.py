"""An engine in another process: frames over a Unix socket, and both ends of it."""
