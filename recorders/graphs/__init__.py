"""Observations inside the user's compiled graphs."""
