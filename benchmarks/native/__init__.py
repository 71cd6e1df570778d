"""The native kernel against its rivals: `python -m benchmarks.native`."""
