"""The contents of a record of attention: layers, samples, statistics and tokens; saving and loading."""
