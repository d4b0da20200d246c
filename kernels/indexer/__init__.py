"""Which cached tokens an indexer chooses, and the highest scores of a row in general."""
