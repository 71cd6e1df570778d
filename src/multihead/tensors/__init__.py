"""Tensors: their sizes and checks, whether their values may be read here, and changes that are undone."""
