"""The commands `walk` and `lab`, which `multihead` finds by their entry points."""
