"""Find, classify, compare and describe the heads of recorded layers."""
