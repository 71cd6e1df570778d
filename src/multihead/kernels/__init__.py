"""Kernels: modules that compute an attention request, each with `refusal`, `attend` and `estimate_work`."""
