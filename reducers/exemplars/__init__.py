"""Observations that are kept."""
