"""Recordings: results without hooks, which can be merged, saved, loaded and synchronised."""
