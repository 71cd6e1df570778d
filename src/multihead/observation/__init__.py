"""Record the attention calls of a model while it runs."""
