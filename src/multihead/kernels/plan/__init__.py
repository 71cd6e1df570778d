"""Plans: convert a mask to intervals, tiles and rectangles that a kernel computes."""
