"""When to plan the next step, and its length."""
