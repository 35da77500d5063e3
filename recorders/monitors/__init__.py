"""A reducer bound to one place of one module."""
