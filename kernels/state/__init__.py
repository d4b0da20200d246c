"""Kernels over states of sequences: convolution, recurrences, the norm behind them."""
