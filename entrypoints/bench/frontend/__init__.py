"""`jackfield bench frontend`: the cost per streamed token in the server process, without a
model."""
