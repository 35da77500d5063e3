"""How reducers are run: many tensors at once, or compiled. Results are those of `update` and `merge`."""
