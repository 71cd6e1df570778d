"""Hugging Face models: load one, make it call this attention, convert each call and its mask, restore."""
