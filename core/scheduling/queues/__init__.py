"""Requests in order: queues, and which of the running ones decode."""
