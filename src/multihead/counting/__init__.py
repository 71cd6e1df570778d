"""A census of heads: the statistics of every head of a model over a whole corpus.

The package is not named `multihead.census`, because a package of that name would replace the function `mh.census` as
soon as one of its modules is imported.
"""
