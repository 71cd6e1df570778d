"""The record of a run: its layers and samples, their statistics and tokens, and its file."""
