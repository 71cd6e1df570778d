"""Benchmarks: each case checks its output before it is timed against a rival in the same process."""
