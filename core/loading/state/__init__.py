"""A model's weights as each rank holds them: taken from a checkpoint, written, and read again."""
