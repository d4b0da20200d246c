"""Benchmarks in process: throughput, latency, start-up, comparison of engines."""
