"""The in-process GPU worker: thread, persistent batch, model runner, sampler, memory."""
