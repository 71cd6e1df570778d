"""Probes: exact statistics and tiles of an attention map that is never held whole."""
