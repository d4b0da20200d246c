"""Scheduler, queues and plans: pure Python, no torch."""
