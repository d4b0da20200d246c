"""Ranks on several hosts, without a cluster: `EngineConfig.nnodes`."""
