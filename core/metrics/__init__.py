"""Metrics and step statistics."""
