"""The key/value cache of an attention layer, for autoregressive decoding."""

from multihead.layer.cache.cache import KeyValueCache

__all__ = ["KeyValueCache"]
