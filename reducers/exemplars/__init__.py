"""Stored observations and samples."""
