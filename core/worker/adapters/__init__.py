"""Adapters on a worker: the model's sites, adapters in host memory, and those on the device."""
