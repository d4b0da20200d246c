"""JSON schemas in grammars: translation, bounds, cost."""
