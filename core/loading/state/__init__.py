"""A rank's weights: taken from a checkpoint, written, and read again."""
