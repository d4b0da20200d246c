"""A step's launches besides its layers: inputs, drafts, results."""
