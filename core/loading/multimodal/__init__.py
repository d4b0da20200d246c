"""Checkpoints of models that take images or sound, of which the text part is served."""
