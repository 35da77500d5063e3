"""Probe: faults that runs of a copy of the net show."""
