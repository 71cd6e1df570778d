"""What it costs to observe every head: `python -m benchmarks.watching`."""
