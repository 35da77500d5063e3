"""How values are distributed."""
