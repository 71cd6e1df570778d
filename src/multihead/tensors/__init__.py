"""Checks of tensor shapes, detection of tracing, and changes to models that can be undone."""
