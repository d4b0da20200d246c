"""The engine's event loop and everything it owns; independent of any model, format or vendor."""
