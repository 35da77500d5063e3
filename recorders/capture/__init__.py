"""From a hook to what a reducer gets."""
