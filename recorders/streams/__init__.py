"""Rows of tensors on disk, unreduced: written in the background while a network runs, read lazily as a dataset."""
