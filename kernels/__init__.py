"""Triton kernels with their launchers, one idea a file; torch twins in reference.py."""
