"""Recordings of an engine's steps, for `jackfield debug replay`, in private files."""
