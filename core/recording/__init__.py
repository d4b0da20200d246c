"""Recordings of the steps of an engine, for `jackfield debug replay`."""
