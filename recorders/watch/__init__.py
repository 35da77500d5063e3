"""Watching a training: lenses, inspector, timeline, charts, findings."""
