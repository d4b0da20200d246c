"""The scheduler halves of a step's capabilities; no torch."""
