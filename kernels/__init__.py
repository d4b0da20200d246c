"""Triton kernels with their launchers, one per file; torch twins in reference.py."""
