"""What a step launches besides its layers: inputs, drafts, results."""
