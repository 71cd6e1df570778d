"""Export layers to the formats of other runtimes."""

from multihead.export import onnx

__all__ = ["onnx"]
