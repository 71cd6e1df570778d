"""The key/value cache of one attention layer, for decoding step by step."""

from multihead.layer.cache.cache import KeyValueCache

__all__ = ["KeyValueCache"]
