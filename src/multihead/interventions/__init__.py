"""Switch heads of a model off, or scale their outputs, to see what they are for."""
