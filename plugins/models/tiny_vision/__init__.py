"""Configuration, tokenizer and weights of the embedded model of pictures."""
