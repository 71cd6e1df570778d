"""A census of heads: the statistics of every head of a model over a whole corpus."""
