"""Any causal model of `transformers`, over this engine's cache and scheduling."""
