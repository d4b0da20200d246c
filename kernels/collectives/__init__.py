"""Sums over several GPUs that write into each other's memory."""
