"""Convert masks to key intervals and rectangles for kernels."""
