"""What was recorded, without hooks: merged, saved, loaded, synchronised."""
