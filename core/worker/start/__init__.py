"""What a worker does once, before its first step."""
