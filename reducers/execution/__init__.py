"""How reducers are run on many tensors at once. Results are those of `update` and `merge`."""
