"""See every head of a model: watch its calls, keep what was seen, and say what stands out."""
