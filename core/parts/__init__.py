"""What the halves of a step's capabilities send each other."""
