"""A training watched: lenses, inspector, timeline, pictures."""
