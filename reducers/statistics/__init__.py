"""Statistics over the elements of a tensor."""
