"""Rotary positions (RoPE): queries and keys are rotated by an angle proportional to the position of their token."""

from multihead.rotary.scalings import Linear, Llama3, Yarn
from multihead.rotary.value import Rotary

__all__ = ["Linear", "Llama3", "Rotary", "Yarn"]
