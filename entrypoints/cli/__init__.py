"""The jackfield command."""
