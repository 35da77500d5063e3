"""Histograms, quantiles, and counts of integers."""
