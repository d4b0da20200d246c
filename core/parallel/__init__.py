"""Several ranks that compute one model: their groups, and which part of it each holds."""
