"""Diagnosis: what is likely wrong with a training, where, since when, why, and what to try."""
