"""Statistics of elements."""
