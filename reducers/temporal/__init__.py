"""Statistics in which time matters."""
