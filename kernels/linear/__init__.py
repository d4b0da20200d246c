"""Linear layers: products with few tokens, dense and quantized."""
