"""Code that Triton compiles for a GPU; importing a module of this package needs Triton."""
