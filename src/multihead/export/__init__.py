"""Layers written in the formats of other runtimes."""

from multihead.export import onnx

__all__ = ["onnx"]
