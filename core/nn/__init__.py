"""Building blocks that model plugins compose."""
