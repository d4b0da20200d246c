"""States: what layers keep of each sequence, whatever its length, instead of keys and values."""
