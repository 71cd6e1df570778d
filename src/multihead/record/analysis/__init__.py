"""Analysis of recorded heads: chance levels, kinds, findings, searches and comparisons."""
