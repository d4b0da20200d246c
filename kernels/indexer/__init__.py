"""Which cached tokens an indexer chooses."""
