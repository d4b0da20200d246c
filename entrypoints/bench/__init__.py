"""`jackfield bench`: the instrument that speed claims are made with."""
