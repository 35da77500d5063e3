"""Reducers built from other reducers."""
