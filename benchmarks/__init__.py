"""Benchmarks: each case checks its output before it is timed against its rival in the same process."""
