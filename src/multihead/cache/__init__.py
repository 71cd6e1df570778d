"""Keys and values of a text while it is written, kept from step to step."""

from multihead.cache.buffers import Held
from multihead.cache.cache import KeyValueCache, Memory

__all__ = ["Held", "KeyValueCache", "Memory"]
