"""Media of requests: where they come from, how they are decoded, what stands for them."""
