"""Rotary positions: queries and keys are turned by an angle that grows with the position of their token."""

from multihead.rotary.scalings import Linear, Llama3, Yarn
from multihead.rotary.value import Rotary

__all__ = ["Linear", "Llama3", "Rotary", "Yarn"]
