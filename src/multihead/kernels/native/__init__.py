"""The native CPU kernel: Python modules that load and call the C++ library built from `csrc/`."""
