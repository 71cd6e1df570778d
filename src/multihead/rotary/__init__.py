"""Rotary position embeddings (RoPE): rotate queries and keys by angles proportional to their positions."""

from multihead.rotary.scalings import Linear, Llama3, Yarn
from multihead.rotary.value import Rotary

__all__ = ["Linear", "Llama3", "Rotary", "Yarn"]
