"""Export a layer as an ONNX model."""

from multihead.export.onnx.model import save, to_model

__all__ = ["save", "to_model"]
