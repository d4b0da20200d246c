"""The KV cache on the device: its size, its layout for connectors, its scales."""
