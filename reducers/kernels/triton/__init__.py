"""Reductions of a tensor on a GPU: one launch that reads it once, and one that joins what its parts gave."""
