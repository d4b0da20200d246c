"""Kernels over recurrent states: convolution, recurrences, and the norm after them."""
