"""Experiments on heads, each computed step by step and returned as data."""
