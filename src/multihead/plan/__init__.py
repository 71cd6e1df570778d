"""Plans: from what a mask means to what a kernel computes."""
