"""Code shared by OpenAI's endpoints: requests, responses, log-probabilities, schemas."""
