"""Mistral's own checkpoints: params.json, consolidated*.safetensors and tekken.json."""
