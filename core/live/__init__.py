"""Live operation: weights that change, and engines that pause, while requests are there."""
