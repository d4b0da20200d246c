"""What the two halves of each capability of a step send each other."""
