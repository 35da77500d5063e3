"""When: steps, phases, gates, and what a step takes."""
