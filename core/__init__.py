"""The event loop and what it owns; knows no model, no format, no vendor by name."""
