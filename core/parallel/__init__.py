"""Ranks that compute one model together, and their shares of it."""
