"""Checks of this repository that no existing tool does."""
