"""Base classes and helpers of all reducers."""
