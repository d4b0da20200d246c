"""Experts that move between ranks, so that each rank computes about as many tokens."""
