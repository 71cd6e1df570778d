"""Kernels in Triton that measure statistics on a GPU; imported only where a call on CUDA needs them."""
