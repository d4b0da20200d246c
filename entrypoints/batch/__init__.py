"""Files of requests: `jackfield run-batch`, and the routes /v1/files and /v1/batches."""
