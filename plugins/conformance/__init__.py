"""Kits that tell whether a plugin keeps its contract; run them with pytest."""
