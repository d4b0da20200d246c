"""Recordings of the steps of an engine, for `jackfield debug replay`; files that are private."""
