"""Audio: files into samples, and samples into what a model reads."""
