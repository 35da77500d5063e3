"""The command `recorders`: looks into what was recorded, compares, reports, checks, merges and exports it."""

from recorders.cli.app import Status, main

__all__ = ["Status", "main"]
