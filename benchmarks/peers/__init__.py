"""Our layer against the attention layers of other libraries: `python -m benchmarks.peers`."""
