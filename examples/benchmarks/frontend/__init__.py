"""The cost per streamed token in the server process, without a model."""
