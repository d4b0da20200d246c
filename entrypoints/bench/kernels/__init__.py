"""`jackfield bench kernels` and `bench tune`: kernels at real shapes."""
