"""Fast and accurate reductions over a single tensor."""
