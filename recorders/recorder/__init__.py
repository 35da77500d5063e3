"""Monitors by name, selected from a net."""
