"""The native CPU kernel: the library of csrc/, and what calls it."""
