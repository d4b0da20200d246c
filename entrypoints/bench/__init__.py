"""`jackfield bench`: benchmarks, the source of every performance claim."""
