"""What is done to scores before the softmax, and what takes part in it beside the keys."""
