"""A course on heads beside the library: the walk through their split, and experiments on their number, as data."""
