"""What KV compression costs in quality: tiny models that must find what a long prompt says."""
