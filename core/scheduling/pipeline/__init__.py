"""Steps of a model in stages: which requests are in which."""
