"""Covariance, spectra and similarity of features."""
