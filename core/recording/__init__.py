"""Recordings of the steps of an engine, for `jackfield debug replay`, and files that are private."""
