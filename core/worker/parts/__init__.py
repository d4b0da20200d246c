"""The worker halves of a step's capabilities."""
