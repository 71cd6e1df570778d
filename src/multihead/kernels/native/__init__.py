"""The native CPU kernel: the library of `csrc/`, and the Python modules that call it."""
