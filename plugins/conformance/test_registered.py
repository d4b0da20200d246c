"""What `pytest --pyargs jackfield.plugins.conformance` collects: `options.py` adds the tests.

One class for each name chosen on the command line; without a choice, nothing.
"""
