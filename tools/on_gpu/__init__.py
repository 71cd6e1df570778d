"""The parts of tools/cuda.py, each a module whose `cases(seconds)` returns what it runs, by name."""
