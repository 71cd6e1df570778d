"""Plans: convert a mask to intervals and rectangles that a kernel computes."""
