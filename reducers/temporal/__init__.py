"""Statistics that depend on the order of the observations."""
