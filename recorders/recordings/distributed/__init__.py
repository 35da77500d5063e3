"""Recordings of many ranks: merged over process groups and meshes, and saved into one folder."""
