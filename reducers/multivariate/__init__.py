"""Features together: covariance, similarity, spectra."""
