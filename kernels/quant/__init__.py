"""Quantized weights in kernels: layouts, dequantization, quantization of rows."""
