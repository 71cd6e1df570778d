"""Change the output of single heads while a model runs, and measure what changes in its predictions."""
